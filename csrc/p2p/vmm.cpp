#include "p2p/vmm.h"

#include <ATen/Functions.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <numeric>

#include "p2p/driver.h"

namespace zcompile::cuda {

namespace {

CUmemLocation location_of(c10::Device device) {
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = device.index();
  return location;
}

// A file descriptor, or a socket: closed at the end.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  int get() const { return number_; }

 private:
  int number_;
};

void check(bool well, const char* what) {
  TORCH_CHECK(well, "zcompile: ", what, " failed while ranks exchanged memory: ", std::strerror(errno));
}

// A signal ends a call that has a time limit, whatever its handler asks for.
template <class Call>
auto despite_signals(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// Sends descriptors to the processes of a group on this host, over sockets without a place in the file system.
class DescriptorExchange {
 public:
  DescriptorExchange(const std::string& group, c10::Device device, int64_t rank, int64_t world)
      : rank_(rank), world_(world), inbox_(open_socket()) {
    static std::atomic<int64_t> count = 0;  // of this process; ranks need not agree
    const int64_t mine[] = {getpid(), count++};
    const auto own = address_of(mine);
    const auto process_group = c10d::resolve_process_group(group);
    patience_ = process_group->getBackend(c10::DeviceType::CUDA)->getBackendOptions()->timeout;
    check(bind(inbox_.get(), reinterpret_cast<const sockaddr*>(&own), sizeof own) == 0, "bind");
    check(listen(inbox_.get(), static_cast<int>(world)) == 0, "listen");
    limit_patience(inbox_);
    // Ranks also meet here: from now on, everybody listens.
    auto from = at::tensor({mine[0], mine[1]}, at::kLong).to(device);
    auto all = at::empty({world * 2}, from.options());
    process_group->_allgather_base(all, from)->wait();
    all = all.cpu();
    for (int64_t peer = 0; peer < world; ++peer) {
      addresses_.push_back(address_of(all.const_data_ptr<int64_t>() + 2 * peer));
      processes_.push_back(all.const_data_ptr<int64_t>()[2 * peer]);
    }
    for (int64_t step = 1; step < world; ++step) {
      const auto& address = addresses_[(rank + step) % world];
      outgoing_.push_back(open_socket());
      limit_patience(outgoing_.back());
      check(
          connect(outgoing_.back().get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0, "connect");
    }
    while (static_cast<int64_t>(incoming_.size()) + 1 < world) {
      Descriptor accepted(despite_signals([&] { return accept(inbox_.get(), nullptr, nullptr); }));
      check(accepted.get() >= 0, "accept");
      ucred who{};
      socklen_t length = sizeof who;
      check(getsockopt(accepted.get(), SOL_SOCKET, SO_PEERCRED, &who, &length) == 0, "getsockopt");
      const auto found = std::find(processes_.begin(), processes_.end(), who.pid);
      if (found == processes_.end()) continue;  // some other process, which gets nothing
      limit_patience(accepted);
      incoming_.emplace_back(found - processes_.begin(), std::move(accepted));
    }
  }

  // To each peer in turn, at the same time as another one's come in: `import(rank, descriptor)`. A few at a time: those
  // that are open and on their way count against the limits of a process.
  template <class Import>
  void exchange(const std::vector<Descriptor>& descriptors, const Import& import) {
    for (int64_t step = 1; step < world_; ++step) {
      const auto from = (rank_ - step + world_) % world_;
      send(outgoing_.at(step - 1), descriptors);
      const auto source =
          std::find_if(incoming_.begin(), incoming_.end(), [&](const auto& one) { return one.first == from; });
      TORCH_CHECK(source != incoming_.end(), "zcompile: rank " + std::to_string(from) + " does not share its memory");
      for (auto& received : receive(source->second, descriptors.size())) import(from, received);
    }
  }

  static constexpr size_t most = 64;  // descriptors in one exchange

 private:
  static Descriptor open_socket() {
    Descriptor opened(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    check(opened.get() >= 0, "socket");
    return opened;
  }

  static sockaddr_un address_of(const int64_t* process) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const auto name = "zcompile-" + std::to_string(process[0]) + "-" + std::to_string(process[1]);
    std::copy(name.begin(), name.end(), address.sun_path + 1);  // a zero in front: in the kernel alone
    return address;
  }

  void limit_patience(const Descriptor& socket) const {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(patience_).count();
    const timeval patience{std::max<time_t>(seconds, 1), 0};
    for (const int option : {SO_RCVTIMEO, SO_SNDTIMEO}) {
      check(setsockopt(socket.get(), SOL_SOCKET, option, &patience, sizeof patience) == 0, "setsockopt");
    }
  }

  // One byte with the descriptors beside it.
  struct Message {
    char byte = 0;
    iovec data{&byte, 1};
    alignas(cmsghdr) char beside[CMSG_SPACE(sizeof(int) * most)] = {};
    msghdr header{};

    explicit Message(size_t count) {
      header.msg_iov = &data;
      header.msg_iovlen = 1;
      header.msg_control = beside;
      header.msg_controllen = CMSG_SPACE(sizeof(int) * count);
    }
    Message(const Message&) = delete;
  };

  static void send(const Descriptor& to, const std::vector<Descriptor>& descriptors) {
    Message message(descriptors.size());
    auto* beside = CMSG_FIRSTHDR(&message.header);
    beside->cmsg_level = SOL_SOCKET;
    beside->cmsg_type = SCM_RIGHTS;
    beside->cmsg_len = CMSG_LEN(sizeof(int) * descriptors.size());
    std::transform(
        descriptors.begin(), descriptors.end(), reinterpret_cast<int*>(CMSG_DATA(beside)),
        [](const auto& one) { return one.get(); });
    check(despite_signals([&] { return sendmsg(to.get(), &message.header, MSG_NOSIGNAL); }) == 1, "sendmsg");
  }

  static std::vector<Descriptor> receive(const Descriptor& from, size_t count) {
    Message message(count);
    const auto bytes = despite_signals([&] { return recvmsg(from.get(), &message.header, MSG_CMSG_CLOEXEC); });
    TORCH_CHECK(bytes != 0, "zcompile: a rank ended while ranks exchanged memory");
    check(bytes == 1, "recvmsg");
    std::vector<Descriptor> received;
    if (auto* beside = CMSG_FIRSTHDR(&message.header)) {
      const auto* numbers = reinterpret_cast<const int*>(CMSG_DATA(beside));
      for (size_t at = 0; at < (beside->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++at) received.emplace_back(numbers[at]);
    }
    TORCH_CHECK(
        received.size() == count, "zcompile: a rank sent " + std::to_string(received.size()) +
                                      " pieces of memory instead of " + std::to_string(count));
    return received;
  }

  int64_t rank_, world_;
  std::chrono::milliseconds patience_{};
  Descriptor inbox_;
  std::vector<sockaddr_un> addresses_;
  std::vector<int64_t> processes_;
  std::vector<Descriptor> outgoing_;  // by steps from this rank
  std::vector<std::pair<int64_t, Descriptor>> incoming_;  // with the rank
};

// Even looking up a function of the driver may fail.
template <class Call>
void give_back(const Call& call) noexcept {
  try {
    call();
  } catch (const std::exception&) {
  }
}

}  // namespace

Block::Block(c10::Device device, int64_t bytes, bool shared) : bytes_(bytes) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = location_of(device);
  properties.requestedHandleTypes = shared ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
  size_t granularity = 0;
  ZCOMPILE_DRIVER_CHECK(cuMemGetAllocationGranularity, &granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  TORCH_CHECK(
      page_bytes % static_cast<int64_t>(granularity) == 0,
      "zcompile: " + device.str() + " maps memory in pieces of " + std::to_string(granularity) + " bytes, more than " +
          std::to_string(page_bytes) + ": use another transport than p2p");
  const auto create = [&] {
    return ZCOMPILE_DRIVER(cuMemCreate)(&handle_, static_cast<size_t>(bytes), &properties, 0ULL);
  };
  auto result = create();
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {  // torch may hold what nobody uses
    c10::cuda::CUDACachingAllocator::emptyCache();
    result = create();
  }
  TORCH_CHECK_WITH(
      OutOfMemoryError, result != CUDA_ERROR_OUT_OF_MEMORY,
      "CUDA out of memory: zcompile's peer-to-peer transport asked for " + std::to_string(bytes) + " bytes on " +
          device.str());
  TORCH_CHECK(result == CUDA_SUCCESS, "zcompile: cuMemCreate failed with driver error " + std::to_string(result));
}

Block::Block(int descriptor, int64_t bytes) : bytes_(bytes) {
  ZCOMPILE_DRIVER_CHECK(
      cuMemImportFromShareableHandle, &handle_, reinterpret_cast<void*>(static_cast<intptr_t>(descriptor)),
      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}

void finish(c10::Device device) noexcept {
  int current = 0;
  if (cudaGetDevice(&current) != cudaSuccess || cudaSetDevice(device.index()) != cudaSuccess)
    return;  // at the end of a process
  cudaDeviceSynchronize();
  cudaSetDevice(current);
}

// Here and below, what fails at the end of a process, when the driver has gone before, is of no interest any more.
Block::~Block() {
  give_back([this] { ZCOMPILE_DRIVER(cuMemRelease)(handle_); });
}

int Block::export_descriptor() const {
  int descriptor = -1;
  ZCOMPILE_DRIVER_CHECK(
      cuMemExportToShareableHandle, &descriptor, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0ULL);
  return descriptor;
}

Range::Range(int64_t bytes) : bytes_(bytes) {
  ZCOMPILE_DRIVER_CHECK(
      cuMemAddressReserve, &begin_, static_cast<size_t>(bytes), static_cast<size_t>(page_bytes), CUdeviceptr{}, 0ULL);
}

Range::~Range() {
  give_back([this] {
    for (const auto& [offset, block] : mapped_) {
      ZCOMPILE_DRIVER(cuMemUnmap)(begin_ + static_cast<CUdeviceptr>(offset), static_cast<size_t>(block->bytes()));
    }
    ZCOMPILE_DRIVER(cuMemAddressFree)(begin_, static_cast<size_t>(bytes_));
  });
}

void Range::map(int64_t offset, std::shared_ptr<const Block> block) {
  const auto bytes = static_cast<size_t>(block->bytes());
  ZCOMPILE_DRIVER_CHECK(cuMemMap, begin_ + static_cast<CUdeviceptr>(offset), bytes, size_t{0}, block->handle(), 0ULL);
  mapped_.emplace_back(offset, std::move(block));
}

void Range::open(c10::Device device) {
  CUmemAccessDesc access{};
  access.location = location_of(device);
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  ZCOMPILE_DRIVER_CHECK(cuMemSetAccess, begin_, static_cast<size_t>(bytes_), &access, size_t{1});
}

SharedBlocks::SharedBlocks(
    const std::string& group, c10::Device device, int64_t rank, int64_t world, std::vector<int64_t> sizes)
    : device_(device) {
  const auto bytes = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  for (int64_t owner = 0; owner < world; ++owner) ranges_.push_back(std::make_unique<Range>(bytes));
  DescriptorExchange descriptors(group, device, rank, world);
  int64_t offset = 0;
  for (size_t first = 0; first < sizes.size(); first += DescriptorExchange::most) {
    const auto end = std::min(sizes.size(), first + DescriptorExchange::most);
    std::vector<Descriptor> exported;
    std::vector<int64_t> offsets;
    for (size_t at = first; at < end; ++at) {
      own_.push_back(std::make_shared<const Block>(device, sizes[at], /*shared=*/true));
      ranges_[rank]->map(offset, own_.back());
      exported.emplace_back(own_.back()->export_descriptor());
      offsets.push_back(std::exchange(offset, offset + sizes[at]));
    }
    std::vector<size_t> arrived(world, 0);
    descriptors.exchange(exported, [&](int64_t owner, const Descriptor& descriptor) {
      const auto at = arrived[owner]++;
      ranges_[owner]->map(offsets[at], std::make_shared<const Block>(descriptor.get(), sizes[first + at]));
    });
  }
  for (const auto& range : ranges_) range->open(device);
}

}  // namespace zcompile::cuda
