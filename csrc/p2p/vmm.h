// Physical memory and addresses apart, by the driver's virtual memory management. A block of whole pages can be mapped
// at several addresses at once: here, and on peers.
#pragma once

#include <c10/core/Device.h>
#include <cuda.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "p2p/schedule/cache_layout.h"
#include "transport/descriptor_sockets.h"

namespace zcompile::cuda {

// Waits for all that `device` has to do: addresses are taken away while nothing runs.
void synchronize(c10::Device device) noexcept;

// Physical memory without an address.
class Block {
 public:
  Block(c10::Device device, int64_t bytes, bool shared);
  Block(int descriptor, int64_t bytes);  // a peer's; the descriptor stays the caller's to close
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
class AddressRange {
 public:
  explicit AddressRange(int64_t bytes);
  ~AddressRange();
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;

  // Maps `block` from `offset` on. The driver maps it whole or not at all.
  void map(int64_t offset, std::shared_ptr<const Block> block);
  // Lets `device` read and write what is mapped.
  void open(c10::Device device);
  char* begin() const { return reinterpret_cast<char*>(begin_); }
  int64_t bytes() const { return bytes_; }

 private:
  CUdeviceptr begin_{};
  int64_t bytes_;
  std::vector<std::pair<int64_t, std::shared_ptr<const Block>>> mapped_;  // with offsets
};

// Blocks of the same sizes on every rank of a group, one after the other, readable and writable by all. All ranks make
// them together. That fails on all of them, or on none.
class SharedBlocks {
 public:
  SharedBlocks(const std::string& group, c10::Device device, int64_t rank, int64_t world, std::vector<int64_t> sizes);
  ~SharedBlocks() { synchronize(device_); }

  char* at(int64_t rank, int64_t offset) const { return ranges_.at(rank)->begin() + offset; }
  int64_t bytes() const { return ranges_.front()->bytes(); }
  const std::shared_ptr<const Block>& block(size_t index) const { return own_.at(index); }  // this rank's

 private:
  void share(DescriptorSockets& sockets, int64_t rank, int64_t world, const std::vector<int64_t>& sizes);

  c10::Device device_;
  std::vector<std::shared_ptr<const Block>> own_;
  std::vector<std::unique_ptr<AddressRange>> ranges_;  // of every rank's memory, as this rank maps it
};

}  // namespace zcompile::cuda
