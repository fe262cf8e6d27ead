// The checks of bytes, lookups and requests; conformance_threads.cc has those
// with threads.
#include "conformance.h"

#include <algorithm>

namespace cachestore::test::conformance {

void Run(MakePipeline make, Check* check) {
  const std::unique_ptr<Pipeline> pipeline = make();
  if (!pipeline->skipped.empty()) SKIP(pipeline->skipped);
  const size_t threads = ThreadCount();
  const size_t descriptors = DescriptorCount();
  check(*pipeline);
  EXPECT_TRUE(Eventually([&] { return ThreadCount() <= threads; }));
  EXPECT_EQ(DescriptorCount(), descriptors);
}

// Equal bytes, nothing beyond them touched.
void RoundTrip(Pipeline& pipeline) {
  const auto store = OpenOrFail(pipeline.setup, pipeline.env);
  ASSERT_TRUE(store != nullptr);
  Pages pages(pipeline.setup, 0, 20, pipeline.skew);
  pages.Fill();
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(pages.size(), CS_OK));
  EXPECT_TRUE(pages.HoldsAll());  // a dump only reads
  pages.Poison();
  EXPECT_TRUE(LoadAll(*store, pages) == Repeated(pages.size(), CS_OK));
  EXPECT_TRUE(pages.HoldsAll());
  EXPECT_TRUE(pages.GuardsIntact());
  const cs_stats stats = store->Stats();
  EXPECT_EQ(stats.dump_ok, pages.size());
  EXPECT_EQ(stats.load_ok, pages.size());
  EXPECT_EQ(stats.dump_bytes, pages.size() * pipeline.setup.payload());
  EXPECT_EQ(stats.load_bytes, pages.size() * pipeline.setup.payload());
}

// A block of several shards, each of several tensors, with padding behind.
void RoundTripOfManyShards(Pipeline& pipeline) {
  const uint32_t shards = pipeline.shards(5);
  pipeline.setup.shards = shards;
  const uint64_t payload = pipeline.setup.payload();
  pipeline.setup.shard_size = (payload + 4095) / 4096 * 4096;
  const auto store = OpenOrFail(pipeline.setup, pipeline.env);
  ASSERT_TRUE(store != nullptr);
  Pages pages(pipeline.setup, 0, 6, pipeline.skew);
  pages.Fill();
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(6 * shards, CS_OK));
  EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(6, 1));
  pages.Poison();
  EXPECT_TRUE(LoadAll(*store, pages) == Repeated(6 * shards, CS_OK));
  EXPECT_TRUE(pages.HoldsAll());
  // One shard of a block, by itself.
  pages.Poison();
  const size_t one = shards + shards / 2;  // in the middle of the second block
  Result<cs_task> task = store->Load(pages.part(one, 1));
  ASSERT_OK(task);
  EXPECT_TRUE(WaitFor(*store, task.value(), 1) == Repeated(1, CS_OK));
  for (size_t i = 0; i < pages.size(); ++i) {
    EXPECT_TRUE(i == one ? pages.Holds(i) : pages.IsPoisoned(i));
  }
}

// Before, after, in any order, with gaps.
void LookupAndPrefix(Pipeline& pipeline) {
  const auto store = OpenOrFail(pipeline.setup, pipeline.env);
  ASSERT_TRUE(store != nullptr);
  Pages pages(pipeline.setup, 0, 150, pipeline.skew);
  Result<size_t> prefix = store->LookupPrefix(0, pages.block_ids());
  ASSERT_OK(prefix);
  EXPECT_EQ(prefix.value(), 0u);
  pages.Fill();
  // All but the 131st and the last: lookups may go in pieces of 128.
  for (const auto& [from, n] : {std::pair<size_t, size_t>{0, 130}, {131, 18}}) {
    Result<cs_task> task = store->Dump(pages.part(from, n));
    ASSERT_OK(task);
    EXPECT_TRUE(WaitFor(*store, task.value(), n) == Repeated(n, CS_OK));
  }
  std::vector<uint8_t> expected(150, 1);
  expected[130] = expected[149] = 0;
  EXPECT_TRUE(LookupAll(*store, pages) == expected);
  prefix = store->LookupPrefix(0, pages.block_ids());
  ASSERT_OK(prefix);
  EXPECT_EQ(prefix.value(), 130u);
  std::vector<BlockId> stored = pages.block_ids();
  stored.pop_back();
  stored.erase(stored.begin() + 130);
  prefix = store->LookupPrefix(0, stored);
  ASSERT_OK(prefix);
  EXPECT_EQ(prefix.value(), stored.size());
  const cs_stats stats = store->Stats();
  EXPECT_EQ(stats.lookup_blocks, 1u + 150u + 131u + 148u);
  EXPECT_EQ(stats.lookup_hits, 0u + 148u + 130u + 148u);
}

// Decision 1: a result a page, in the order given.
void ResultsInOrder(Pipeline& pipeline) {
  const auto store = OpenOrFail(pipeline.setup, pipeline.env);
  ASSERT_TRUE(store != nullptr);
  Pages pages(pipeline.setup, 0, 40, pipeline.skew);
  pages.Fill();
  for (size_t i = 0; i < 40; i += 3) {
    Result<cs_task> task = store->Dump(pages.part(i, 1));
    ASSERT_OK(task);
    EXPECT_TRUE(WaitFor(*store, task.value(), 1) == Repeated(1, CS_OK));
  }
  pages.Poison();
  const Codes codes = LoadAll(*store, pages);
  for (size_t i = 0; i < 40; ++i) {
    EXPECT_EQ(codes[i], i % 3 == 0 ? CS_OK : CS_NOT_FOUND);
    EXPECT_TRUE(i % 3 == 0 ? pages.Holds(i) : pages.IsPoisoned(i));
  }
  EXPECT_EQ(store->Stats().load_ok, 14u);
  EXPECT_EQ(store->Stats().load_absent, 26u);
}

// F04, F06 and decision 1: a damaged page is a miss, its neighbours aren't; it
// is absent from then on, until it is dumped again.
void BadPageAlone(Pipeline& pipeline) {
  auto store = OpenOrFail(pipeline.setup, pipeline.env);
  ASSERT_TRUE(store != nullptr);
  Pages pages(pipeline.setup, 0, 9, pipeline.skew);
  pages.Fill();
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(9, CS_OK));
  if (pipeline.has_memory) store->Close();  // what is damaged is what is stored
  pipeline.damage(pages.block_ids()[4]);
  if (pipeline.has_memory) store = OpenOrFail(pipeline.setup, pipeline.env);
  ASSERT_TRUE(store != nullptr);
  pages.Poison();
  Codes expected = Repeated(9, CS_OK);
  expected[4] = CS_CORRUPT;
  EXPECT_TRUE(LoadAll(*store, pages) == expected);
  for (size_t i = 0; i < 9; ++i) EXPECT_TRUE(i == 4 || pages.Holds(i));
  std::vector<uint8_t> present(9, 1);
  present[4] = 0;
  EXPECT_TRUE(LookupAll(*store, pages) == present);
  EXPECT_EQ(store->Stats().load_corrupt, 1u);
  pages.Fill();
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(9, CS_OK));
  EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(9, 1));
  pages.Poison();
  EXPECT_TRUE(LoadAll(*store, pages) == Repeated(9, CS_OK));
  EXPECT_TRUE(pages.HoldsAll());
}

// The same block more than once in a request: every mention is served.
void TwiceInOneRequest(Pipeline& pipeline) {
  const uint32_t shards = pipeline.shards(2);
  pipeline.setup.shards = shards;
  // Nothing here is another process's: waiting for one isn't how it may end.
  pipeline.setup.peer_timeout_ms = 10 * static_cast<uint32_t>(kLong.count());
  const auto store = OpenOrFail(pipeline.setup, pipeline.env);
  ASSERT_TRUE(store != nullptr);
  // Two pages of memory for one and the same block.
  Pages once(pipeline.setup, 1, 1, pipeline.skew);
  Pages again(pipeline.setup, 1, 1, pipeline.skew);
  once.Fill();
  again.Fill();
  std::vector<uint8_t> ids;
  std::vector<uint32_t> indices;
  std::vector<uint64_t> addresses;
  std::vector<uint64_t> sizes;
  for (const Pages* pages : {&once, &again}) {
    const cs_batch batch = pages->batch();
    ids.insert(ids.end(), batch.block_ids, batch.block_ids + 16 * batch.n);
    indices.insert(indices.end(), batch.shard_indices, batch.shard_indices + batch.n);
    addresses.insert(addresses.end(), batch.addresses, batch.addresses + batch.n * batch.m);
    sizes.insert(sizes.end(), batch.sizes, batch.sizes + batch.n * batch.m);
  }
  const size_t n = size_t{2} * shards;
  const cs_batch both = {n,
                         ids.data(),
                         indices.data(),
                         pipeline.setup.tensor_sizes.size(),
                         addresses.data(),
                         sizes.data(),
                         nullptr,
                         /*pool=*/0};
  Result<cs_task> task = store->Dump(both);
  ASSERT_OK(task);
  EXPECT_TRUE(WaitFor(*store, task.value(), n) == Repeated(n, CS_OK));
  once.Poison();
  again.Poison();
  task = store->Load(both);
  ASSERT_OK(task);
  EXPECT_TRUE(WaitFor(*store, task.value(), n) == Repeated(n, CS_OK));
  EXPECT_TRUE(once.HoldsAll());
  EXPECT_TRUE(again.HoldsAll());
}

// A block's shards may come in any order, mixed with those of others.
void ShardsOutOfOrder(Pipeline& pipeline) {
  pipeline.setup.shards = pipeline.shards(3);
  const auto store = OpenOrFail(pipeline.setup, pipeline.env);
  ASSERT_TRUE(store != nullptr);
  Pages pages(pipeline.setup, 0, 4, pipeline.skew);
  pages.Fill();
  const cs_batch batch = pages.batch();
  const size_t n = batch.n;
  std::vector<uint8_t> ids;
  std::vector<uint32_t> indices;
  std::vector<uint64_t> addresses;
  std::vector<uint64_t> sizes;
  for (size_t k = 0; k < n; ++k) {
    const size_t i = (k * 7 + 5) % n;  // a permutation of 12, and of 4
    ids.insert(ids.end(), batch.block_ids + 16 * i, batch.block_ids + 16 * (i + 1));
    indices.push_back(batch.shard_indices[i]);
    addresses.insert(addresses.end(), batch.addresses + i * batch.m,
                     batch.addresses + (i + 1) * batch.m);
    sizes.insert(sizes.end(), batch.sizes + i * batch.m, batch.sizes + (i + 1) * batch.m);
  }
  const cs_batch mixed = {
      n,         ids.data(), indices.data(), batch.m, addresses.data(), sizes.data(), nullptr,
      /*pool=*/0};
  Result<cs_task> task = store->Dump(mixed);
  ASSERT_OK(task);
  EXPECT_TRUE(WaitFor(*store, task.value(), n) == Repeated(n, CS_OK));
  pages.Poison();
  EXPECT_TRUE(LoadAll(*store, pages) == Repeated(n, CS_OK));
  EXPECT_TRUE(pages.HoldsAll());
}

// A page that is stored already costs no write and keeps its bytes.
void ExistingIsNotWritten(Pipeline& pipeline) {
  const auto store = OpenOrFail(pipeline.setup, pipeline.env);
  ASSERT_TRUE(store != nullptr);
  Pages pages(pipeline.setup, 0, 6, pipeline.skew);
  pages.Fill();
  const size_t before = pipeline.env.calls(pipeline.dump_op);
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(6, CS_OK));
  // A pipeline may write behind the caller's back.
  const size_t writes = before + 6;
  EXPECT_TRUE(Eventually([&] { return pipeline.env.calls(pipeline.dump_op) >= writes; }));
  pages.Fill(1);
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(6, CS_OK));
  EXPECT_EQ(pipeline.env.calls(pipeline.dump_op), writes);
  const cs_stats stats = store->Stats();
  EXPECT_EQ(stats.dump_ok + stats.dump_existing, 12u);
  EXPECT_EQ(stats.dump_bytes, stats.dump_ok * pipeline.setup.payload());
  if (!pipeline.writes_through) EXPECT_EQ(stats.dump_existing, 6u);
  EXPECT_TRUE(LoadAll(*store, pages) == Repeated(6, CS_OK));
  // A block's bytes are all one: no memory asks the storage before it takes them.
  if (!pipeline.writes_through) EXPECT_TRUE(pages.HoldsAll(0));
}

void SeenByTheNextStore(Pipeline& pipeline) {
  Pages pages(pipeline.setup, 0, 6, pipeline.skew);
  pages.Fill();
  {
    const auto store = OpenOrFail(pipeline.setup, pipeline.env);
    ASSERT_TRUE(store != nullptr);
    EXPECT_TRUE(DumpAll(*store, pages) == Repeated(6, CS_OK));
    store->Close();
  }
  pages.Poison();
  const auto store = OpenOrFail(pipeline.setup, pipeline.env);
  ASSERT_TRUE(store != nullptr);
  EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(6, 1));
  EXPECT_TRUE(LoadAll(*store, pages) == Repeated(6, CS_OK));
  EXPECT_TRUE(pages.HoldsAll());
}

// Everything of this identity, nothing of another; usable at once.
void Clear(Pipeline& pipeline) {
  StoreSetup other_setup = pipeline.setup;
  other_setup.identity = "other";
  other_setup.fingerprint = 2;
  const auto store = OpenOrFail(pipeline.setup, pipeline.env);
  const auto other = OpenOrFail(other_setup, pipeline.env);
  ASSERT_TRUE(store != nullptr && other != nullptr);
  EXPECT_OK(store->Clear());  // an empty one
  Pages pages(pipeline.setup, 0, 12, pipeline.skew);
  pages.Fill();
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(12, CS_OK));
  EXPECT_TRUE(DumpAll(*other, pages) == Repeated(12, CS_OK));
  EXPECT_OK(store->Clear());
  EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(12, 0));
  EXPECT_TRUE(LoadAll(*store, pages) == Repeated(12, CS_NOT_FOUND));
  EXPECT_TRUE(LookupAll(*other, pages) == std::vector<uint8_t>(12, 1));
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(12, CS_OK));
  EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(12, 1));
  pages.Poison();
  EXPECT_TRUE(LoadAll(*store, pages) == Repeated(12, CS_OK));
  EXPECT_TRUE(pages.HoldsAll());
}

// Rule 7 of c_api.h.
void NothingToDo(Pipeline& pipeline) {
  const auto store = OpenOrFail(pipeline.setup, pipeline.env);
  ASSERT_TRUE(store != nullptr);
  EXPECT_OK(store->Lookup(0, {}, {}));
  Result<size_t> prefix = store->LookupPrefix(0, {});
  ASSERT_OK(prefix);
  EXPECT_EQ(prefix.value(), 0u);
  const cs_batch empty = {0,       nullptr, nullptr, pipeline.setup.tensor_sizes.size(),
                          nullptr, nullptr, nullptr, /*pool=*/0};
  for (int direction = 0; direction < 2; ++direction) {
    Result<cs_task> task = direction == 0 ? store->Load(empty) : store->Dump(empty);
    ASSERT_OK(task);
    EXPECT_NE(task.value(), 0u);
    EXPECT_OK(store->Wait(task.value(), kLong, {}));
  }
}

// Nothing of a wrong batch is begun, and the text names what is wrong.
void WrongBatchesRefused(Pipeline& pipeline) {
  const uint32_t shards = pipeline.shards(2);
  const size_t blocks = 4 / shards;
  pipeline.setup.shards = shards;
  const auto store = OpenOrFail(pipeline.setup, pipeline.env);
  ASSERT_TRUE(store != nullptr);
  const Pages pages(pipeline.setup, 0, blocks, pipeline.skew);
  const cs_batch good = pages.batch();
  const size_t m = good.m;
  const auto expect = [&](const cs_batch& batch, bool dump_only, const char* named) {
    for (int direction = dump_only ? 1 : 0; direction < 2; ++direction) {
      const Result<cs_task> task = direction == 0 ? store->Load(batch) : store->Dump(batch);
      EXPECT_EQ(task.status().code(), CS_INVALID);
      if (task.status().text().find(named) == std::string::npos) {
        Fail(__FILE__, __LINE__, std::string(named) + " isn't in: " + task.status().text());
      }
    }
  };
  cs_batch bad = good;
  bad.m = m + 1;
  expect(bad, false, "m is");
  bad = good;
  bad.block_ids = nullptr;
  expect(bad, false, "block_ids");
  bad = good;
  bad.addresses = nullptr;
  expect(bad, false, "addresses");
  bad = good;
  bad.sizes = nullptr;
  expect(bad, false, "sizes");
  std::vector<uint64_t> addresses(good.addresses, good.addresses + good.n * m);
  addresses[m + 1] = 0;
  bad = good;
  bad.addresses = addresses.data();
  expect(bad, false, ("addresses[" + std::to_string(m + 1) + "]").c_str());
  std::vector<uint64_t> sizes(good.sizes, good.sizes + good.n * m);
  sizes[2 * m] -= 1;
  bad = good;
  bad.sizes = sizes.data();
  expect(bad, false, ("sizes[" + std::to_string(2 * m) + "]").c_str());
  std::vector<uint32_t> indices(good.shard_indices, good.shard_indices + good.n);
  indices[1] = shards;
  bad = good;
  bad.shard_indices = indices.data();
  expect(bad, false, "shard_indices[1]");
  // All shards of each block, each once; one shard can't be wrong in that.
  if (shards > 1) {
    indices[1] = 0;
    expect(bad, true, "twice");
    expect(pages.part(0, 3), true, "1 shards of a block of 2");
    bad = good;
    bad.shard_indices = nullptr;  // all 0
    expect(bad, true, "twice");
  }

  const cs_stats stats = store->Stats();
  EXPECT_EQ(stats.load_outstanding, 0u);
  EXPECT_EQ(stats.dump_outstanding, 0u);
  EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(blocks, 0));
}

// A task ends with its one wait; a wait with a wrong count leaves it as it is.
void TasksAreWaitedForOnce(Pipeline& pipeline) {
  const auto store = OpenOrFail(pipeline.setup, pipeline.env);
  ASSERT_TRUE(store != nullptr);
  Pages pages(pipeline.setup, 0, 3, pipeline.skew);
  pages.Fill();
  Codes codes(4, -1);
  EXPECT_EQ(store->Wait(0, kLong, codes).code(), CS_INVALID);
  EXPECT_EQ(store->Wait(12345, kLong, codes).code(), CS_INVALID);
  Result<cs_task> task = store->Dump(pages.batch());
  ASSERT_OK(task);
  EXPECT_EQ(store->Wait(task.value(), kLong, codes).code(), CS_INVALID);
  codes.resize(3);
  EXPECT_OK(store->Wait(task.value(), kLong, codes));
  EXPECT_TRUE(codes == Repeated(3, CS_OK));
  EXPECT_EQ(store->Wait(task.value(), kLong, codes).code(), CS_INVALID);
}

// Decision 5: a request that doesn't fit leaves no trace; its room is all
// there afterwards.
void WholeOrNothing(Pipeline& pipeline) {
  pipeline.setup.*pipeline.depth = 4;
  const auto store = OpenOrFail(pipeline.setup, pipeline.env);
  ASSERT_TRUE(store != nullptr);
  Pages pages(pipeline.setup, 0, 5, pipeline.skew);
  pages.Fill();
  for (int round = 0; round < 3; ++round) {
    EXPECT_TRUE(DumpAll(*store, pages) == Repeated(5, CS_REFUSED));
    EXPECT_TRUE(LoadAll(*store, pages) == Repeated(5, CS_REFUSED));
  }
  EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(5, 0));
  EXPECT_EQ(store->Stats().dump_refused, 15u);
  EXPECT_EQ(store->Stats().load_refused, 15u);
  for (int round = 0; round < 3; ++round) {
    Result<cs_task> task = store->Dump(pages.part(0, 4));
    ASSERT_OK(task);
    EXPECT_TRUE(WaitFor(*store, task.value(), 4) == Repeated(4, CS_OK));
    EXPECT_EQ(store->Stats().dump_outstanding, 0u);
    task = store->Load(pages.part(0, 4));
    ASSERT_OK(task);
    EXPECT_TRUE(WaitFor(*store, task.value(), 4) == Repeated(4, CS_OK));
    EXPECT_EQ(store->Stats().load_outstanding, 0u);
  }
}

}  // namespace cachestore::test::conformance
