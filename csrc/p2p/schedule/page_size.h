// The driver's page: the unit in which memory is mapped.
#pragma once

#include <cstdint>

namespace zcompile {

constexpr int64_t page_bytes = 2 << 20;  // what H100 and H200 map at the least; a device that needs more is refused

// The nearest multiple of a page.
constexpr int64_t page_below(int64_t bytes) { return bytes / page_bytes * page_bytes; }
constexpr int64_t page_above(int64_t bytes) { return page_below(bytes + page_bytes - 1); }

}  // namespace zcompile
