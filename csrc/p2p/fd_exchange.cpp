#include "p2p/fd_exchange.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

namespace zcompile::cuda {

namespace {

void check(bool succeeded, const char* what) {
  TORCH_CHECK(succeeded, "zcompile: ", what, " failed while ranks exchanged memory: ", std::strerror(errno));
}

// Repeats a call that a signal of the operating system ended. A call that has a time limit is ended by one whatever the
// signal's handler asks for.
template <class Call>
auto despite_signals(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

std::chrono::milliseconds timeout_of(const std::string& group) {
  return c10d::resolve_process_group(group)->getBackend(c10::DeviceType::CUDA)->getBackendOptions()->timeout;
}

Descriptor open_socket() {
  Descriptor opened(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  check(opened.get() >= 0, "socket");
  return opened;
}

sockaddr_un address_of(int64_t process, int64_t number) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const auto name = "zcompile-" + std::to_string(process) + "-" + std::to_string(number);
  std::copy(name.begin(), name.end(), address.sun_path + 1);  // a zero in front: in the kernel alone
  return address;
}

// One byte with the descriptors beside it.
struct Message {
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * DescriptorExchange::max_descriptors)] = {};
  msghdr header{};

  explicit Message(size_t count) {
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(sizeof(int) * count);
  }
  Message(const Message&) = delete;
};

void send(const Descriptor& to, const std::vector<Descriptor>& descriptors) {
  Message message(descriptors.size());
  auto* control = CMSG_FIRSTHDR(&message.header);
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  control->cmsg_len = CMSG_LEN(sizeof(int) * descriptors.size());
  std::transform(
      descriptors.begin(), descriptors.end(), reinterpret_cast<int*>(CMSG_DATA(control)),
      [](const auto& descriptor) { return descriptor.get(); });
  check(despite_signals([&] { return sendmsg(to.get(), &message.header, MSG_NOSIGNAL); }) == 1, "sendmsg");
}

std::vector<Descriptor> receive(const Descriptor& from, size_t count) {
  Message message(count);
  const auto bytes = despite_signals([&] { return recvmsg(from.get(), &message.header, MSG_CMSG_CLOEXEC); });
  TORCH_CHECK(bytes != 0, "zcompile: a rank ended while ranks exchanged memory");
  check(bytes == 1, "recvmsg");
  std::vector<Descriptor> received;
  if (auto* control = CMSG_FIRSTHDR(&message.header)) {
    const auto* numbers = reinterpret_cast<const int*>(CMSG_DATA(control));
    const auto arrived = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < arrived; ++i) received.emplace_back(numbers[i]);
  }
  TORCH_CHECK(
      received.size() == count, "zcompile: a rank sent " + std::to_string(received.size()) +
                                    " pieces of memory instead of " + std::to_string(count));
  return received;
}

}  // namespace

Descriptor::~Descriptor() {
  if (number_ >= 0) close(number_);
}

DescriptorExchange::DescriptorExchange(const std::string& group, c10::Device device, int64_t rank, int64_t world)
    : rank_(rank), world_(world), patience_(timeout_of(group)), inbox_(open_socket()) {
  static std::atomic<int64_t> count = 0;  // of this process; ranks need not agree
  const int64_t process = getpid(), number = count++;
  listen_at(process, number);
  gather_addresses(group, device, process, number);
  connect_to_peers();
  accept_peers();
}

void DescriptorExchange::listen_at(int64_t process, int64_t number) {
  const auto own = address_of(process, number);
  check(bind(inbox_.get(), reinterpret_cast<const sockaddr*>(&own), sizeof own) == 0, "bind");
  check(listen(inbox_.get(), static_cast<int>(world_)) == 0, "listen");
  limit_patience(inbox_);
}

// The collective is also a barrier: from here on, everybody listens.
void DescriptorExchange::gather_addresses(
    const std::string& group, c10::Device device, int64_t process, int64_t number) {
  auto from = at::tensor({process, number}, at::kLong).to(device);
  auto all = at::empty({world_ * 2}, from.options());
  c10d::resolve_process_group(group)->_allgather_base(all, from)->wait();
  all = all.cpu();
  const auto* numbers = all.const_data_ptr<int64_t>();
  for (int64_t peer = 0; peer < world_; ++peer) {
    addresses_.push_back(address_of(numbers[2 * peer], numbers[2 * peer + 1]));
    processes_.push_back(numbers[2 * peer]);
  }
}

void DescriptorExchange::connect_to_peers() {
  for (int64_t step = 1; step < world_; ++step) {
    const auto& address = addresses_[(rank_ + step) % world_];
    outgoing_.push_back(open_socket());
    limit_patience(outgoing_.back());
    const auto connected = connect(outgoing_.back().get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
    check(connected == 0, "connect");
  }
}

void DescriptorExchange::accept_peers() {
  while (static_cast<int64_t>(incoming_.size()) + 1 < world_) {
    Descriptor accepted(despite_signals([&] { return accept(inbox_.get(), nullptr, nullptr); }));
    check(accepted.get() >= 0, "accept");
    ucred credentials{};
    socklen_t length = sizeof credentials;
    check(getsockopt(accepted.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0, "getsockopt");
    const auto process = std::find(processes_.begin(), processes_.end(), credentials.pid);
    if (process == processes_.end()) continue;  // some other process, which gets nothing
    limit_patience(accepted);
    incoming_.emplace_back(process - processes_.begin(), std::move(accepted));
  }
}

void DescriptorExchange::exchange(const std::vector<Descriptor>& descriptors, const Import& import) {
  for (int64_t step = 1; step < world_; ++step) {
    const auto from = (rank_ - step + world_) % world_;
    send(outgoing_.at(step - 1), descriptors);
    const auto source =
        std::find_if(incoming_.begin(), incoming_.end(), [&](const auto& peer) { return peer.first == from; });
    TORCH_CHECK(source != incoming_.end(), "zcompile: rank " + std::to_string(from) + " does not share its memory");
    for (const auto& received : receive(source->second, descriptors.size())) import(from, received);
  }
}

void DescriptorExchange::limit_patience(const Descriptor& socket) const {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(patience_).count();
  const timeval patience{std::max<time_t>(seconds, 1), 0};
  for (const int option : {SO_RCVTIMEO, SO_SNDTIMEO}) {
    check(setsockopt(socket.get(), SOL_SOCKET, option, &patience, sizeof patience) == 0, "setsockopt");
  }
}

}  // namespace zcompile::cuda
