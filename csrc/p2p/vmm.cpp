#include "p2p/vmm.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/Exception.h>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <exception>
#include <numeric>

#include "p2p/driver.h"
#include "transport/process_groups.h"

namespace zcompile::cuda {

namespace {

CUmemLocation location_of(c10::Device device) {
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = device.index();
  return location;
}

// Ignores failures at the end of a process, when the driver may be gone, and even looking up a function may fail.
template <class Call>
void ignore_failure(const Call& call) noexcept {
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
          std::to_string(page_bytes) + ", so p2p does not work on it: compile with options={'transport': 'nccl'}");
  const auto create = [&] {
    return ZCOMPILE_DRIVER(cuMemCreate)(&handle_, static_cast<size_t>(bytes), &properties, 0ULL);
  };
  auto result = create();
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {  // torch may have cached unused memory
    c10::cuda::CUDACachingAllocator::emptyCache();
    result = create();
  }
  TORCH_CHECK_WITH(
      OutOfMemoryError, result != CUDA_ERROR_OUT_OF_MEMORY,
      "CUDA out of memory: zcompile's peer-to-peer transport asked for " + std::to_string(bytes) + " bytes on " +
          device.str() + ". Free memory there, or compile with options={'transport': 'nccl'}.");
  TORCH_CHECK(
      result == CUDA_SUCCESS, "zcompile: cuMemCreate of " + std::to_string(bytes) + " bytes failed on " + device.str() +
                                  " with driver error " + std::to_string(result) +
                                  ": compile with options={'transport': 'nccl'}");
}

Block::Block(int descriptor, int64_t bytes) : bytes_(bytes) {
  ZCOMPILE_DRIVER_CHECK(
      cuMemImportFromShareableHandle, &handle_, reinterpret_cast<void*>(static_cast<intptr_t>(descriptor)),
      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}

void synchronize(c10::Device device) noexcept {
  int current = 0;
  if (cudaGetDevice(&current) != cudaSuccess || cudaSetDevice(device.index()) != cudaSuccess)
    return;  // fails if the process ends
  cudaDeviceSynchronize();
  cudaSetDevice(current);
}

Block::~Block() {
  ignore_failure([this] { ZCOMPILE_DRIVER(cuMemRelease)(handle_); });
}

int Block::export_descriptor() const {
  int descriptor = -1;
  ZCOMPILE_DRIVER_CHECK(
      cuMemExportToShareableHandle, &descriptor, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0ULL);
  return descriptor;
}

AddressRange::AddressRange(int64_t bytes) : bytes_(bytes) {
  ZCOMPILE_DRIVER_CHECK(
      cuMemAddressReserve, &begin_, static_cast<size_t>(bytes), static_cast<size_t>(page_bytes), CUdeviceptr{}, 0ULL);
}

AddressRange::~AddressRange() {
  ignore_failure([this] {
    for (const auto& [offset, block] : mapped_) {
      ZCOMPILE_DRIVER(cuMemUnmap)(begin_ + static_cast<CUdeviceptr>(offset), static_cast<size_t>(block->bytes()));
    }
    ZCOMPILE_DRIVER(cuMemAddressFree)(begin_, static_cast<size_t>(bytes_));
  });
}

void AddressRange::map(int64_t offset, std::shared_ptr<const Block> block) {
  const auto bytes = static_cast<size_t>(block->bytes());
  ZCOMPILE_DRIVER_CHECK(cuMemMap, begin_ + static_cast<CUdeviceptr>(offset), bytes, size_t{0}, block->handle(), 0ULL);
  mapped_.emplace_back(offset, std::move(block));
}

void AddressRange::open(c10::Device device) {
  CUmemAccessDesc access{};
  access.location = location_of(device);
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  ZCOMPILE_DRIVER_CHECK(cuMemSetAccess, begin_, static_cast<size_t>(bytes_), &access, size_t{1});
}

SharedBlocks::SharedBlocks(
    const std::string& group, c10::Device device, int64_t rank, int64_t world, std::vector<int64_t> sizes)
    : device_(device) {
  auto sockets = DescriptorSockets::connect_all(group, device, rank, world, timeout_of(group));
  fail_together(group, device, [&] {
    const auto connected = std::move(sockets);  // closed at the end: if share() throws, peers that wait throw too
    share(*connected, rank, world, sizes);
  });
}

void SharedBlocks::share(DescriptorSockets& sockets, int64_t rank, int64_t world, const std::vector<int64_t>& sizes) {
  const auto bytes = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  for (int64_t owner = 0; owner < world; ++owner) ranges_.push_back(std::make_unique<AddressRange>(bytes));
  int64_t offset = 0;
  for (size_t first = 0; first < sizes.size(); first += DescriptorSockets::max_descriptors) {
    const auto end = std::min(sizes.size(), first + DescriptorSockets::max_descriptors);
    std::vector<Descriptor> exported;
    std::vector<int64_t> offsets;
    for (size_t i = first; i < end; ++i) {
      own_.push_back(std::make_shared<const Block>(device_, sizes[i], /*shared=*/true));
      ranges_[rank]->map(offset, own_.back());
      exported.emplace_back(own_.back()->export_descriptor());
      offsets.push_back(std::exchange(offset, offset + sizes[i]));
    }
    std::vector<size_t> arrived(world, 0);
    sockets.exchange(exported, [&](int64_t owner, const Descriptor& descriptor) {
      const auto i = arrived[owner]++;
      ranges_[owner]->map(offsets[i], std::make_shared<const Block>(descriptor.get(), sizes[first + i]));
    });
  }
  for (const auto& range : ranges_) range->open(device_);
}

}  // namespace zcompile::cuda
