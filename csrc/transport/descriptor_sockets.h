// Sockets by which ranks of one host give each other file descriptors. A descriptor is how a driver hands memory to
// another process.
//
// They have no place in the file system, and names of 128 random bits, which ranks tell each other over their process
// group. A name that could be guessed could be taken by another process first. Both ends ask the kernel whether the
// other is a process of the group, and of the same user.
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

class DescriptorSockets {
 public:
  static constexpr size_t name_length = 32;
  static constexpr size_t max_descriptors = 64;  // that are open and on their way count against a process's limits

  // Listens at a new name. No call waits longer than `patience` for a peer.
  DescriptorSockets(int64_t rank, int64_t world, std::chrono::milliseconds patience);
  const std::string& name() const { return name_; }

  struct Peer {
    std::string name;
    int64_t process;  // its id
  };
  // Connects to each of `peers`, which are by rank and have this rank too. All of them listen.
  void connect(std::vector<Peer> peers);
  // Takes the connections of all peers, which have connected. Other processes are turned away.
  void accept();
  // The same between all ranks of a group, which call this together. It fails on all of them, or on none. What follows
  // may fail on one rank. If that rank then ends its sockets, the calls of the others fail too.
  static std::unique_ptr<DescriptorSockets> connect_all(
      const std::string& group, c10::Device device, int64_t rank, int64_t world, std::chrono::milliseconds patience);

  using Import = std::function<void(int64_t rank, const Descriptor& descriptor)>;
  // Sends `descriptors`, at most `max_descriptors`, to each peer in turn, while those of another one come in, and hands
  // these to `import`. All ranks send equally many.
  void exchange(const std::vector<Descriptor>& descriptors, const Import& import);

 private:
  int64_t rank_, world_;
  std::chrono::milliseconds patience_;
  std::string name_;
  Descriptor inbox_;
  std::vector<Peer> peers_;  // by rank
  std::vector<Descriptor> outgoing_;  // by steps from this rank
  std::vector<std::pair<int64_t, Descriptor>> incoming_;  // with the rank
};

}  // namespace zcompile
