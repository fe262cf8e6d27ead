// What every pipeline must do, whatever it is made of. For each pipeline, one
// line makes a test of every check:
//
//   CONFORMANCE_TESTS(PosixZeroCopy, MakePosixZeroCopy)
#ifndef CACHESTORE_TESTS_CONFORMANCE_H_
#define CACHESTORE_TESTS_CONFORMANCE_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "fault_env.h"
#include "fixture.h"
#include "harness.h"

namespace cachestore::test {

// A pipeline under test, in directories of its own.
struct Pipeline {
  TempDir root;
  FaultEnv env;
  StoreSetup setup;
  size_t skew = 0;      // of the pages' tensors from their alignment
  std::string skipped;  // why it can't be tested here; "" if it can
  // Changes one byte of what is stored of this block.
  std::function<void(const BlockId&)> damage;
  // The operation that moves a shard's bytes, and how the gate's hook tells it.
  Op load_op = Op::kReadFull;
  Op dump_op = Op::kWriteFull;

  // What differs from a plain storage.
  uint32_t max_shards = UINT32_MAX;  // of a block
  // The queue that takes the callers' requests.
  uint32_t StoreSetup::* depth = &StoreSetup::queue_depth;
  // Loads are served from memory of the store's own, until it is opened anew;
  // dumps are stored behind the callers' backs, at close at the latest; and what
  // is accepted is completed at close, not refused.
  bool has_memory = false;
  // Some of the dumps go past that memory, which doesn't tell whether they were
  // stored already.
  bool writes_through = false;

  uint32_t shards(uint32_t wanted) const { return std::min(wanted, max_shards); }
};

using MakePipeline = std::unique_ptr<Pipeline> (*)();

namespace conformance {

using Check = void(Pipeline&);

// Bytes and lookups.
Check RoundTrip;
Check RoundTripOfManyShards;
Check LookupAndPrefix;
Check ResultsInOrder;
Check BadPageAlone;
Check TwiceInOneRequest;
Check ShardsOutOfOrder;
Check ExistingIsNotWritten;
Check SeenByTheNextStore;
Check Clear;
// Requests.
Check NothingToDo;
Check WrongBatchesRefused;
Check TasksAreWaitedForOnce;
Check WholeOrNothing;
// Threads.
Check ConcurrentDumpsOfOneBlock;
Check MixedLoad;
Check EveryShardEndsOnce;
Check CloseWithWork;
Check CloseBehindWaiters;

void Run(MakePipeline make, Check* check);

}  // namespace conformance
}  // namespace cachestore::test

#define CONFORMANCE_TEST(Suite, make, check) \
  TEST(Suite, check) { conformance::Run(make, &conformance::check); }

#define CONFORMANCE_TESTS(Suite, make)                     \
  CONFORMANCE_TEST(Suite, make, RoundTrip)                 \
  CONFORMANCE_TEST(Suite, make, RoundTripOfManyShards)     \
  CONFORMANCE_TEST(Suite, make, LookupAndPrefix)           \
  CONFORMANCE_TEST(Suite, make, ResultsInOrder)            \
  CONFORMANCE_TEST(Suite, make, BadPageAlone)              \
  CONFORMANCE_TEST(Suite, make, TwiceInOneRequest)         \
  CONFORMANCE_TEST(Suite, make, ShardsOutOfOrder)          \
  CONFORMANCE_TEST(Suite, make, ExistingIsNotWritten)      \
  CONFORMANCE_TEST(Suite, make, SeenByTheNextStore)        \
  CONFORMANCE_TEST(Suite, make, Clear)                     \
  CONFORMANCE_TEST(Suite, make, NothingToDo)               \
  CONFORMANCE_TEST(Suite, make, WrongBatchesRefused)       \
  CONFORMANCE_TEST(Suite, make, TasksAreWaitedForOnce)     \
  CONFORMANCE_TEST(Suite, make, WholeOrNothing)            \
  CONFORMANCE_TEST(Suite, make, ConcurrentDumpsOfOneBlock) \
  CONFORMANCE_TEST(Suite, make, MixedLoad)                 \
  CONFORMANCE_TEST(Suite, make, EveryShardEndsOnce)        \
  CONFORMANCE_TEST(Suite, make, CloseWithWork)             \
  CONFORMANCE_TEST(Suite, make, CloseBehindWaiters)

#endif  // CACHESTORE_TESTS_CONFORMANCE_H_
