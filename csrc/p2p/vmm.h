// Physical memory in blocks of whole pages, which can be mapped at several addresses at once: here, and on peers.
#pragma once

#include <c10/core/Device.h>

#include <cuda.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace zcompile::cuda {

constexpr int64_t page_bytes = 2 << 20;  // what H100 and H200 map at the least; a device that needs more is refused

constexpr int64_t page_below(int64_t bytes) { return bytes / page_bytes * page_bytes; }
constexpr int64_t page_above(int64_t bytes) { return page_below(bytes + page_bytes - 1); }

// Waits for all that `device` has to do: addresses are taken away while nothing runs.
void finish(c10::Device device) noexcept;

// Memory without an address.
class Block {
 public:
  Block(c10::Device device, int64_t bytes, bool shared);
  Block(int descriptor, int64_t bytes);  // a peer's, which stays the caller's to close
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  int export_descriptor() const;  // the caller's to close
  CUmemGenericAllocationHandle handle() const { return handle_; }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_;
  CUmemGenericAllocationHandle handle_{};
};

// Addresses, and what is mapped there.
class Range {
 public:
  explicit Range(int64_t bytes);
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  // `block` from `offset` on; the driver maps it whole or not at all.
  void map(int64_t offset, std::shared_ptr<const Block> block);
  // What is mapped may be read and written by `device`.
  void open(c10::Device device);
  char* begin() const { return reinterpret_cast<char*>(begin_); }
  int64_t bytes() const { return bytes_; }

 private:
  CUdeviceptr begin_{};
  int64_t bytes_;
  std::vector<std::pair<int64_t, std::shared_ptr<const Block>>> mapped_;  // with offsets
};

// Blocks of the same sizes on every rank of a group, one after the other, readable and writable by all. Made
// collectively.
class SharedBlocks {
 public:
  SharedBlocks(const std::string& group, c10::Device device, int64_t rank, int64_t world, std::vector<int64_t> sizes);
  ~SharedBlocks() { finish(device_); }

  char* at(int64_t rank, int64_t offset) const { return ranges_.at(rank)->begin() + offset; }
  int64_t bytes() const { return ranges_.front()->bytes(); }
  const std::shared_ptr<const Block>& block(size_t index) const { return own_.at(index); }  // this rank's

 private:
  c10::Device device_;
  std::vector<std::shared_ptr<const Block>> own_;
  std::vector<std::unique_ptr<Range>> ranges_;  // of every rank's memory, as this rank maps it
};

}  // namespace zcompile::cuda
