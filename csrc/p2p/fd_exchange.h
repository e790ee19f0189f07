// Exchanges file descriptors between the ranks of a group on one host, over Unix sockets. A descriptor is how the
// driver hands memory to another process.
#pragma once

#include <c10/core/Device.h>

#include <sys/un.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace zcompile::cuda {

// A file descriptor, or a socket: closed at the end.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  int get() const { return number_; }

 private:
  int number_;
};

// Its sockets have no place in the file system. All ranks make it together.
class DescriptorExchange {
 public:
  DescriptorExchange(const std::string& group, c10::Device device, int64_t rank, int64_t world);

  using Import = std::function<void(int64_t rank, const Descriptor& descriptor)>;
  // Sends `descriptors` to each peer in turn, while those of another one come in, and hands these to `import`. At most
  // `max_descriptors` at a time: descriptors that are open and on their way count against the limits of a process.
  void exchange(const std::vector<Descriptor>& descriptors, const Import& import);

  static constexpr size_t max_descriptors = 64;

 private:
  void listen_at(int64_t process, int64_t number);
  void gather_addresses(const std::string& group, c10::Device device, int64_t process, int64_t number);
  void connect_to_peers();
  void accept_peers();
  void limit_patience(const Descriptor& socket) const;

  int64_t rank_, world_;
  std::chrono::milliseconds patience_;  // the process group's timeout
  Descriptor inbox_;
  std::vector<sockaddr_un> addresses_;  // by rank
  std::vector<int64_t> processes_;  // by rank
  std::vector<Descriptor> outgoing_;  // by steps from this rank
  std::vector<std::pair<int64_t, Descriptor>> incoming_;  // with the rank
};

}  // namespace zcompile::cuda
