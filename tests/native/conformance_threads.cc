// The conformance checks with many threads.
#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "conformance.h"

namespace cachestore::test::conformance {
namespace {

class Threads {
 public:
  template <typename Body>
  Threads(size_t n, Body body) {
    for (size_t i = 0; i < n; ++i) threads_.emplace_back([body, i] { body(i); });
  }
  void Join() {
    for (std::thread& thread : threads_) {
      if (thread.joinable()) thread.join();
    }
  }
  ~Threads() { Join(); }

 private:
  std::vector<std::thread> threads_;
};

uint64_t Sum(const cs_stats& s, bool loads) {
  return loads ? s.load_ok + s.load_absent + s.load_corrupt + s.load_failed + s.load_timeout +
                     s.load_refused
               : s.dump_ok + s.dump_existing + s.dump_failed + s.dump_no_space + s.dump_timeout +
                     s.dump_refused;
}

}  // namespace

// All are told that it is stored, and it is, once and whole.
void ConcurrentDumpsOfOneBlock(Pipeline& pipeline) {
  const uint32_t shards = pipeline.shards(2);
  pipeline.setup.shards = shards;
  pipeline.setup.dump_workers = 4;
  pipeline.setup.copy_workers = 4;
  const auto store = OpenOrFail(pipeline.setup, pipeline.env);
  ASSERT_TRUE(store != nullptr);
  for (uint64_t round = 0; round < 10; ++round) {
    Threads threads(4, [&](size_t) {
      Pages pages(pipeline.setup, round, 1, pipeline.skew);
      pages.Fill();
      EXPECT_TRUE(DumpAll(*store, pages) == Repeated(shards, CS_OK));
      EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(1, 1));
      pages.Poison();
      EXPECT_TRUE(LoadAll(*store, pages) == Repeated(shards, CS_OK));
      EXPECT_TRUE(pages.HoldsAll());
    });
    threads.Join();
  }
  EXPECT_EQ(Sum(store->Stats(), false), 10u * 4 * shards);
}

// Loads, dumps, lookups and clears at once: a load gives the block's bytes or
// a miss, nothing else.
void MixedLoad(Pipeline& pipeline) {
  pipeline.setup.shards = pipeline.shards(2);
  const auto store = OpenOrFail(pipeline.setup, pipeline.env);
  ASSERT_TRUE(store != nullptr);
  std::atomic<uint64_t> loaded{0};
  Threads threads(6, [&](size_t self) {
    std::mt19937_64 random(self);
    for (int round = 0; round < 40; ++round) {
      Pages pages(pipeline.setup, random() % 24, 1 + random() % 6, pipeline.skew);
      switch (random() % 8) {
        case 0:
        case 1:
        case 2:
          pages.Fill();
          EXPECT_TRUE(DumpAll(*store, pages) == Repeated(pages.size(), CS_OK));
          EXPECT_TRUE(pages.HoldsAll());
          break;
        case 3:
        case 4:
        case 5: {
          pages.Poison();
          const Codes codes = LoadAll(*store, pages);
          for (size_t i = 0; i < codes.size(); ++i) {
            EXPECT_TRUE(codes[i] == CS_OK || codes[i] == CS_NOT_FOUND);
            EXPECT_TRUE(codes[i] == CS_OK ? pages.Holds(i) : pages.IsPoisoned(i));
            if (codes[i] == CS_OK) ++loaded;
          }
          break;
        }
        case 6:
          (void)LookupAll(*store, pages);
          break;
        default:
          if (random() % 4 == 0) EXPECT_OK(store->Clear());
          break;
      }
      EXPECT_TRUE(pages.GuardsIntact());
    }
  });
  threads.Join();
  EXPECT_GT(loaded.load(), 0u);
  const cs_stats stats = store->Stats();
  EXPECT_EQ(stats.load_outstanding, 0u);
  EXPECT_EQ(stats.dump_outstanding, 0u);
  EXPECT_EQ(stats.load_corrupt, 0u);
  EXPECT_EQ(Sum(stats, true), stats.load_requested);
  EXPECT_EQ(Sum(stats, false), stats.dump_requested);
}

// Decision 3, under time limits of nothing, refusals and a narrow queue: every
// shard has one result, and the memory is the caller's again.
void EveryShardEndsOnce(Pipeline& pipeline) {
  const uint32_t shards = pipeline.shards(2);
  pipeline.setup.shards = shards;
  pipeline.setup.*pipeline.depth = 12 * shards;
  const auto store = OpenOrFail(pipeline.setup, pipeline.env);
  ASSERT_TRUE(store != nullptr);
  std::atomic<uint64_t> asked{0};
  Threads threads(6, [&](size_t self) {
    std::mt19937_64 random(100 + self);
    for (int round = 0; round < 60; ++round) {
      Pages pages(pipeline.setup, random() % 24, 1 + random() % 6, pipeline.skew);
      const std::chrono::milliseconds limit(random() % 3);
      const bool dump = random() % 2 == 0;
      if (dump) {
        pages.Fill();
      } else {
        pages.Poison();
      }
      const Codes codes = dump ? DumpAll(*store, pages, limit) : LoadAll(*store, pages, limit);
      asked += codes.size();
      for (size_t i = 0; i < codes.size(); ++i) {
        EXPECT_TRUE(codes[i] == CS_OK || codes[i] == CS_TIMEOUT || codes[i] == CS_REFUSED ||
                    (!dump && codes[i] == CS_NOT_FOUND));
        if (!dump && codes[i] == CS_OK) EXPECT_TRUE(pages.Holds(i));
      }
      // If a transfer were still on this memory, a sanitizer or the next
      // round's owner of it would notice.
      pages.Fill(7);
      EXPECT_TRUE(pages.HoldsAll(7));
      if (random() % 16 == 0) EXPECT_OK(store->Clear());
    }
  });
  threads.Join();
  EXPECT_TRUE(Eventually([&] { return store->Stats().stuck_workers == 0; }));
  const cs_stats stats = store->Stats();
  EXPECT_EQ(stats.load_outstanding, 0u);
  EXPECT_EQ(stats.dump_outstanding, 0u);
  EXPECT_EQ(stats.load_requested + stats.dump_requested, asked.load());
  EXPECT_EQ(Sum(stats, true), stats.load_requested);
  EXPECT_EQ(Sum(stats, false), stats.dump_requested);
  EXPECT_EQ(stats.load_corrupt, 0u);
  // Nothing is worn out.
  Pages pages(pipeline.setup, 1000, 6, pipeline.skew);
  pages.Fill();
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(6 * shards, CS_OK));
  pages.Poison();
  EXPECT_TRUE(LoadAll(*store, pages) == Repeated(6 * shards, CS_OK));
  EXPECT_TRUE(pages.HoldsAll());
}

// Close with transfers running and queued: the running ones complete, the
// others end with CS_CLOSED, or complete, too, if that is how the pipeline does
// it; nothing is accepted any more, and what a dump was told is stored is.
void CloseWithWork(Pipeline& pipeline) {
  auto store = OpenOrFail(pipeline.setup, pipeline.env);
  ASSERT_TRUE(store != nullptr);
  Pages stored(pipeline.setup, 0, 8, pipeline.skew);
  stored.Fill();
  EXPECT_TRUE(DumpAll(*store, stored) == Repeated(8, CS_OK));
  stored.Poison();
  if (pipeline.has_memory) {
    store->Close();
    store = OpenOrFail(pipeline.setup, pipeline.env);
    ASSERT_TRUE(store != nullptr);
  }
  const cs_stats before = store->Stats();
  Pages dumped(pipeline.setup, 100, 8, pipeline.skew);
  dumped.Fill();

  Gate gate;
  pipeline.env.Before(pipeline.load_op, Holding(gate));
  pipeline.env.Before(pipeline.dump_op, Holding(gate));
  Result<cs_task> load = store->Load(stored.batch());
  Result<cs_task> dump = store->Dump(dumped.batch());
  ASSERT_OK(load);
  ASSERT_OK(dump);
  ASSERT_TRUE(gate.WaitArrived(4));  // two workers each
  std::thread closer([&] { store->Close(); });
  const uint64_t running = 2;
  if (pipeline.has_memory) {
    uint8_t present = 0;
    const BlockId id = stored.block_ids()[0];
    EXPECT_TRUE(
        Eventually([&] { return store->Lookup(0, {&id, 1}, {&present, 1}).code() == CS_CLOSED; }));
    EXPECT_EQ(store->Stats().load_outstanding, 8u);
  } else {
    // Queued shards end while the running ones are still held.
    EXPECT_TRUE(Eventually([&] {
      const cs_stats stats = store->Stats();
      return stats.load_outstanding == running && stats.dump_outstanding == running;
    }));
  }
  gate.Open();
  closer.join();
  const cs_stats stats = store->Stats();
  const uint64_t completed = pipeline.has_memory ? 8 : running;
  EXPECT_EQ(stats.load_outstanding, 0u);
  EXPECT_EQ(stats.dump_outstanding, 0u);
  EXPECT_EQ(stats.load_ok, completed);
  EXPECT_EQ(stats.dump_ok - before.dump_ok, completed);
  size_t loaded = 0;
  for (size_t i = 0; i < stored.size(); ++i) {
    loaded += stored.Holds(i) ? 1 : 0;
    EXPECT_TRUE(stored.Holds(i) || stored.IsPoisoned(i));
  }
  EXPECT_EQ(loaded, completed);
  EXPECT_EQ(store->Load(stored.batch()).status().code(), CS_CLOSED);
  EXPECT_EQ(store->Dump(stored.batch()).status().code(), CS_CLOSED);
  uint8_t present = 0;
  EXPECT_EQ(store->Lookup(0, {stored.block_ids().data(), 1}, {&present, 1}).code(), CS_CLOSED);
  EXPECT_EQ(store->Clear().code(), CS_CLOSED);

  // The storage itself, without what is in front of it.
  StoreSetup plain = pipeline.setup;
  plain.pipeline = "Posix";
  const auto storage = OpenOrFail(plain);
  ASSERT_TRUE(storage != nullptr);
  const std::vector<uint8_t> there = LookupAll(*storage, dumped);
  EXPECT_EQ(std::count(there.begin(), there.end(), 1), completed);
}

// Rule 1: waits that were entered before Close, or come while it runs, return
// with results, and not before their memory is free.
void CloseBehindWaiters(Pipeline& pipeline) {
  const uint32_t shards = pipeline.shards(2);
  pipeline.setup.shards = shards;
  auto store = OpenOrFail(pipeline.setup, pipeline.env);
  ASSERT_TRUE(store != nullptr);
  Pages stored(pipeline.setup, 0, 6, pipeline.skew);
  const size_t n = stored.size();
  stored.Fill();
  EXPECT_TRUE(DumpAll(*store, stored) == Repeated(n, CS_OK));
  stored.Poison();
  if (pipeline.has_memory) {
    store->Close();
    store = OpenOrFail(pipeline.setup, pipeline.env);
    ASSERT_TRUE(store != nullptr);
  }

  Gate gate;
  pipeline.env.Before(pipeline.load_op, Holding(gate));
  std::vector<cs_task> tasks;
  for (size_t i = 0; i < n; i += shards) {
    Result<cs_task> task = store->Load(stored.part(i, shards));
    ASSERT_OK(task);
    tasks.push_back(task.value());
  }
  ASSERT_TRUE(gate.WaitArrived(2));
  std::atomic<size_t> closed{0};
  std::atomic<size_t> ok{0};
  std::atomic<bool> closing{false};
  Threads waiters(6, [&](size_t self) {
    // Half of them come when Close is under way.
    if (self % 2 == 1) EXPECT_TRUE(Eventually([&] { return closing.load(); }));
    Codes codes(shards, -1);
    EXPECT_OK(store->Wait(tasks[self], kLong, codes));
    for (size_t i = 0; i < shards; ++i) {
      EXPECT_TRUE(codes[i] == CS_OK || codes[i] == CS_CLOSED);
      EXPECT_TRUE(codes[i] != CS_OK || stored.Holds(shards * self + i));
      (codes[i] == CS_OK ? ok : closed).fetch_add(1);
    }
  });
  std::thread closer([&] { store->Close(); });
  if (pipeline.has_memory) {
    EXPECT_TRUE(Eventually([&] {
      uint8_t present = 0;
      const BlockId id = stored.block_ids()[0];
      return store->Lookup(0, {&id, 1}, {&present, 1}).code() == CS_CLOSED;
    }));
    EXPECT_EQ(store->Stats().load_outstanding, n);
  } else {
    EXPECT_TRUE(Eventually([&] { return store->Stats().load_outstanding == 2; }));
  }
  closing = true;
  gate.Open();
  waiters.Join();
  closer.join();
  EXPECT_EQ(ok.load(), pipeline.has_memory ? n : 2u);
  EXPECT_EQ(ok.load() + closed.load(), n);
}

}  // namespace cachestore::test::conformance
