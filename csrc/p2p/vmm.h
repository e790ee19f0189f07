// Physical memory that can be mapped at several addresses at once, in this process and in those of peers.
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

// Waits for all work of `device`, because memory must not be unmapped while work runs.
void synchronize(c10::Device device) noexcept;

// Physical memory of a GPU, without an address.
class Block {
 public:
  Block(c10::Device device, int64_t bytes, bool shared);
  Block(int descriptor, int64_t bytes);  // a peer's block; the caller closes the descriptor
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  int export_descriptor() const;  // the caller closes it
  CUmemGenericAllocationHandle handle() const { return handle_; }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_;
  CUmemGenericAllocationHandle handle_{};
};

class AddressRange {
 public:
  explicit AddressRange(int64_t bytes);
  ~AddressRange();
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;

  void map(int64_t offset, std::shared_ptr<const Block> block);
  void open(c10::Device device);  // lets `device` read and write the mapped blocks
  char* begin() const { return reinterpret_cast<char*>(begin_); }
  int64_t bytes() const { return bytes_; }

 private:
  CUdeviceptr begin_{};
  int64_t bytes_;
  std::vector<std::pair<int64_t, std::shared_ptr<const Block>>> mapped_;  // pairs of offset and block
};

// Memory that all ranks of a group can read and write. On every rank, blocks of the same sizes are mapped one after the
// other. The constructor is a collective call, and fails on all ranks or on none.
class SharedBlocks {
 public:
  SharedBlocks(const std::string& group, c10::Device device, int64_t rank, int64_t world, std::vector<int64_t> sizes);
  ~SharedBlocks() { synchronize(device_); }

  char* at(int64_t rank, int64_t offset) const { return ranges_.at(rank)->begin() + offset; }
  int64_t bytes() const { return ranges_.front()->bytes(); }
  const std::shared_ptr<const Block>& block(size_t index) const { return own_.at(index); }  // of this rank

 private:
  void share(DescriptorSockets& sockets, int64_t rank, int64_t world, const std::vector<int64_t>& sizes);

  c10::Device device_;
  std::vector<std::shared_ptr<const Block>> own_;
  std::vector<std::unique_ptr<AddressRange>> ranges_;  // every rank's memory, mapped in this process
};

}  // namespace zcompile::cuda
