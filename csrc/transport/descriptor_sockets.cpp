#include "transport/descriptor_sockets.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <sys/random.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "transport/process_groups.h"

namespace zcompile {

namespace {

void check(bool succeeded, const char* what) {
  TORCH_CHECK(
      succeeded, "zcompile: ", what, " failed while ranks shared GPU memory (p2p): ", std::strerror(errno),
      ". Compile with options={'transport': 'nccl'}.");
}

// Repeats a system call that a signal has interrupted. A call with a timeout is interrupted even with SA_RESTART.
template <class Call>
auto despite_signals(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

void set_timeout(const Descriptor& socket, std::chrono::milliseconds patience) {
  const timeval limit{patience.count() / 1000, patience.count() % 1000 * 1000};
  for (const int option : {SO_RCVTIMEO, SO_SNDTIMEO}) {
    check(setsockopt(socket.get(), SOL_SOCKET, option, &limit, sizeof limit) == 0, "setsockopt");
  }
}

Descriptor open_socket() {
  Descriptor opened(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  check(opened.get() >= 0, "socket");
  return opened;
}

std::string random_name() {
  std::array<unsigned char, DescriptorSockets::name_length / 2> bytes{};
  const auto drawn = despite_signals([&] { return getrandom(bytes.data(), bytes.size(), 0); });
  check(drawn == static_cast<ssize_t>(bytes.size()), "getrandom");
  constexpr auto* digits = "0123456789abcdef";
  std::string name;
  for (const auto byte : bytes) {
    name += digits[byte >> 4];
    name += digits[byte & 15];
  }
  return name;
}

struct Address {
  sockaddr_un address{};
  socklen_t length;

  explicit Address(const std::string& name) {
    const auto path = "zcompile-" + name;
    TORCH_CHECK(
        name.size() == DescriptorSockets::name_length, "zcompile: a rank sent '", name,
        "' as the name of its socket (p2p): the ranks' builds differ, or a zcompile bug");
    address.sun_family = AF_UNIX;
    std::copy(path.begin(), path.end(), address.sun_path + 1);  // after a zero byte: an abstract socket
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + path.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

// Returns the process and user at the other end of a connection.
ucred credentials_of(const Descriptor& socket) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  check(getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0, "getsockopt");
  return credentials;
}

std::vector<DescriptorSockets::Peer> tell_peers(const std::string& group, c10::Device device, const std::string& name) {
  constexpr auto length = static_cast<int64_t>(DescriptorSockets::name_length + sizeof(int64_t));
  const int64_t process = getpid();
  auto own = at::empty({length}, at::kByte);
  auto* bytes = static_cast<char*>(own.mutable_data_ptr());
  std::memcpy(bytes, name.data(), DescriptorSockets::name_length);
  std::memcpy(bytes + DescriptorSockets::name_length, &process, sizeof process);
  const auto all = gather_bytes(group, device, own).cpu();
  std::vector<DescriptorSockets::Peer> peers;
  for (int64_t rank = 0; rank < all.size(0); ++rank) {
    const auto* told = static_cast<const char*>(all.const_data_ptr()) + rank * length;
    peers.push_back({std::string(told, DescriptorSockets::name_length), 0});
    std::memcpy(&peers.back().process, told + DescriptorSockets::name_length, sizeof process);
  }
  return peers;
}

// A message of one byte, with descriptors as ancillary data (SCM_RIGHTS).
struct Message {
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * DescriptorSockets::max_descriptors)] = {};
  msghdr header{};

  explicit Message(size_t count) {
    TORCH_CHECK(
        count <= DescriptorSockets::max_descriptors, "zcompile: ", count,
        " file descriptors in one message of p2p: a zcompile bug");
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(sizeof(int) * count);
  }
  Message(const Message&) = delete;
};

constexpr const char* peer_is_gone = "zcompile: a rank ended, or failed, while ranks shared GPU memory: see its error";

void send(const Descriptor& to, const std::vector<Descriptor>& descriptors) {
  Message message(descriptors.size());
  auto* control = CMSG_FIRSTHDR(&message.header);
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  control->cmsg_len = CMSG_LEN(sizeof(int) * descriptors.size());
  std::transform(
      descriptors.begin(), descriptors.end(), reinterpret_cast<int*>(CMSG_DATA(control)),
      [](const auto& descriptor) { return descriptor.get(); });
  const auto bytes = despite_signals([&] { return sendmsg(to.get(), &message.header, MSG_NOSIGNAL); });
  TORCH_CHECK(bytes != -1 || (errno != EPIPE && errno != ECONNRESET), peer_is_gone);
  check(bytes == 1, "sendmsg");
}

std::vector<Descriptor> receive(const Descriptor& from, size_t count) {
  Message message(count);
  const auto bytes = despite_signals([&] { return recvmsg(from.get(), &message.header, MSG_CMSG_CLOEXEC); });
  TORCH_CHECK(bytes != 0 && (bytes != -1 || errno != ECONNRESET), peer_is_gone);
  check(bytes == 1, "recvmsg");
  std::vector<Descriptor> received;
  if (auto* control = CMSG_FIRSTHDR(&message.header)) {
    const auto* numbers = reinterpret_cast<const int*>(CMSG_DATA(control));
    const auto arrived = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < arrived; ++i) received.emplace_back(numbers[i]);
  }
  TORCH_CHECK(
      received.size() == count, "zcompile: only " + std::to_string(received.size()) + " of " + std::to_string(count) +
                                    " file descriptors of another rank's GPU memory arrived (p2p). Raise the limit of "
                                    "open files (ulimit -n). If this does not help, ranks gather different parameters: "
                                    "check that all ranks run the same code.");
  return received;
}

}  // namespace

Descriptor::~Descriptor() {
  if (number_ >= 0) close(number_);
}

DescriptorSockets::DescriptorSockets(int64_t rank, int64_t world, std::chrono::milliseconds patience)
    : rank_(rank), world_(world), patience_(patience), name_(random_name()), inbox_(open_socket()) {
  const Address own(name_);
  check(bind(inbox_.get(), own.get(), own.length) == 0, "bind");
  check(listen(inbox_.get(), static_cast<int>(world_)) == 0, "listen");
}

void DescriptorSockets::connect(std::vector<Peer> peers) {
  peers_ = std::move(peers);
  for (int64_t step = 1; step < world_; ++step) {
    const auto rank = (rank_ + step) % world_;
    const auto& peer = peers_.at(rank);
    const Address address(peer.name);
    outgoing_.push_back(open_socket());
    set_timeout(outgoing_.back(), patience_);
    const auto connected =
        despite_signals([&] { return ::connect(outgoing_.back().get(), address.get(), address.length); });
    check(connected == 0, "connect");
    const auto other = credentials_of(outgoing_.back());
    TORCH_CHECK(
        other.pid == peer.process && other.uid == geteuid(),
        "zcompile: rank " + std::to_string(rank) + " is process " + std::to_string(peer.process) +
            ", but its socket belongs to process " + std::to_string(other.pid) + " of user " +
            std::to_string(other.uid) +
            ": p2p needs ranks of one user, in one PID namespace (containers have their own). Compile with "
            "options={'transport': 'nccl'}.");
  }
}

void DescriptorSockets::accept() {
  const auto deadline = std::chrono::steady_clock::now() + patience_;
  while (static_cast<int64_t>(incoming_.size()) + 1 < world_) {
    const auto left = deadline - std::chrono::steady_clock::now();
    TORCH_CHECK(
        left.count() > 0, "zcompile: ", incoming_.size(), " of ", world_ - 1, " ranks connected to rank ", rank_,
        " within ", patience_.count(), " ms, while ranks shared GPU memory (p2p): another rank stopped; see its error");
    set_timeout(inbox_, std::chrono::ceil<std::chrono::milliseconds>(left));
    Descriptor accepted(::accept4(inbox_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (accepted.get() < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    check(accepted.get() >= 0, "accept");
    const auto other = credentials_of(accepted);
    const auto peer =
        std::find_if(peers_.begin(), peers_.end(), [&](const Peer& each) { return each.process == other.pid; });
    if (peer == peers_.end() || other.uid != geteuid()) continue;  // a process that is no rank gets no descriptors
    set_timeout(accepted, patience_);
    incoming_.emplace_back(peer - peers_.begin(), std::move(accepted));
  }
}

std::unique_ptr<DescriptorSockets> DescriptorSockets::connect_all(
    const std::string& group, c10::Device device, int64_t rank, int64_t world, std::chrono::milliseconds patience) {
  std::unique_ptr<DescriptorSockets> sockets;
  fail_together(group, device, [&] { sockets = std::make_unique<DescriptorSockets>(rank, world, patience); });
  const auto peers = tell_peers(group, device, sockets->name());
  fail_together(group, device, [&] { sockets->connect(peers); });
  fail_together(group, device, [&] { sockets->accept(); });
  return sockets;
}

void DescriptorSockets::exchange(const std::vector<Descriptor>& descriptors, const Import& import) {
  for (int64_t step = 1; step < world_; ++step) {
    const auto from = (rank_ - step + world_) % world_;
    send(outgoing_.at(step - 1), descriptors);
    const auto source =
        std::find_if(incoming_.begin(), incoming_.end(), [&](const auto& peer) { return peer.first == from; });
    TORCH_CHECK(source != incoming_.end(), "zcompile: rank " + std::to_string(from) + " did not connect (p2p)");
    for (const auto& received : receive(source->second, descriptors.size())) import(from, received);
  }
}

}  // namespace zcompile
