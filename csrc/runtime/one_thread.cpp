#include "runtime/one_thread.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <thread>

#include "transport/rank_agreement.h"

namespace zcompile {

namespace {

std::atomic<std::thread::id> inside;

}  // namespace

OneThread::OneThread(const std::string& param, int64_t rank) {
  auto nobody = std::thread::id();
  if (inside.compare_exchange_strong(nobody, std::this_thread::get_id())) return;
  RankAgreement::stop();
  TORCH_CHECK(
      false, "zcompile: two threads of rank ", rank, " run sharded models at once, one of them with parameter '", param,
      "'. Sharded models must run from one thread at a time, in one order on all ranks.");
}

OneThread::~OneThread() { inside = std::thread::id(); }

}  // namespace zcompile
