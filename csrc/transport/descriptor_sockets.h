// Unix sockets over which ranks of one host send each other file descriptors, by which the CUDA driver shares GPU
// memory between processes. The sockets are abstract: they have no path in the file system. Their names are 128 random
// bits, which ranks exchange over their process group, because another process could bind a name that it can guess.
// Both ends of a connection ask the kernel whether the other end is a process of the group, and of the same user.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace zcompile {

// A file descriptor, or a socket. The destructor closes it.
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

class DescriptorSockets {
 public:
  static constexpr size_t name_length = 32;
  static constexpr size_t max_descriptors = 64;  // of one exchange: the kernel limits how many a user has in flight

  // Listens at a new name. No call waits longer than `patience` for a peer.
  DescriptorSockets(int64_t rank, int64_t world, std::chrono::milliseconds patience);
  const std::string& name() const { return name_; }

  struct Peer {
    std::string name;
    int64_t process;  // its id
  };
  void connect(std::vector<Peer> peers);  // in the order of ranks, including this one; all must already listen
  void accept();  // accepts the connections of all peers, which must already have connected; rejects other processes
  // Connects all ranks of a group; a collective call, which fails on all ranks or on none. Later calls may fail on one
  // rank alone. If that rank then destroys its sockets, the calls of the other ranks fail too.
  static std::unique_ptr<DescriptorSockets> connect_all(
      const std::string& group, c10::Device device, int64_t rank, int64_t world, std::chrono::milliseconds patience);

  using Import = std::function<void(int64_t rank, const Descriptor& descriptor)>;
  // Sends `descriptors` to each peer, and passes those that arrive to `import`. All ranks must send equally many.
  void exchange(const std::vector<Descriptor>& descriptors, const Import& import);

 private:
  int64_t rank_, world_;
  std::chrono::milliseconds patience_;
  std::string name_;
  Descriptor inbox_;
  std::vector<Peer> peers_;  // by rank
  std::vector<Descriptor> outgoing_;  // [i]: to rank (rank_ + 1 + i) % world_
  std::vector<std::pair<int64_t, Descriptor>> incoming_;  // with the rank at the other end
};

}  // namespace zcompile
