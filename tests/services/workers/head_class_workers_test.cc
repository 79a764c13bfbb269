// Requests with head classes through a prefill and a decode worker: what is reserved, what moves, and that nothing else
// is different from the plain model.
#include "tests/services/workers/workers_fixture.h"

namespace spl {
namespace {

class HeadClassWorkersTest : public WorkersTest {
 protected:
  void SetUp() override {
    reuse_.set_policy("redknot");
    reuse_.mutable_heads()->set_restore_share(0);
    // Ranks add up in another order, which may turn a choice of rows.
    if (GetParam().f32()) reuse_.mutable_heads()->set_ffn_mass(1);
  }
  // The path of a map for splice-tiny with as many global heads as the preset says, spread over the model.
  static std::string MapFile(const std::string& preset) {
    const std::string path =
        testing::TempDir() + "/head_classes_" + preset + "_" + std::to_string(::getpid()) + ".json";
    std::ofstream(path) << engine::HeadClassMap::Spread(12, 4, *engine::FindHeadPreset(preset)).ToJson();
    return path;
  }
  std::shared_ptr<const engine::StreamClasses> Classes() const {
    return engine::ServedClasses(*model_->head_classes());
  }
  // docs/methods/redknot.md, "What is sent", head by head and rounded to pages.
  int64_t KeptPages(int64_t num_tokens) const {
    int64_t pages = 0;
    for (int32_t layer = 0; layer < 12; ++layer) {
      for (int32_t head = 0; head < 4; ++head) {
        const engine::HeadClass c = model_->head_classes()->served(layer, head);
        const int64_t all = (num_tokens + 63) / 64;
        if (c.is_global) {
          pages += all;
          continue;
        }
        const int64_t sinks = (c.sinks + 63) / 64, first = std::max<int64_t>(num_tokens - c.window, 0) / 64;
        pages += first <= sinks ? all : sinks + all - first;
      }
    }
    return pages;
  }
  int64_t DensePages(int64_t num_tokens) const { return engine::PagesForTokens(model_->config(), num_tokens); }
  uint64_t Bytes(int64_t pages) const { return static_cast<uint64_t>(pages) * model_->page_bytes(); }
};

// What does not depend on whether each worker has a pool of its own.
class HeadClassTokensTest : public HeadClassWorkersTest {
 protected:
  uint64_t Moved(int64_t pages) const { return GetParam().in_place() ? 0 : Bytes(pages); }
};

TEST_P(HeadClassTokensTest, OnlyWhatIsKeptMovesAndTokensEqualThePlainModel) {
  for (const char* preset : {"safe", "mid", "paper"}) {
    StartWorkers(MapFile(preset));
    const bool all_lengths = std::string(preset) == "paper";
    for (size_t length : all_lengths ? std::vector<size_t>{40, 500, 1500} : std::vector<size_t>{1300}) {
      const auto prompt = Prompt(static_cast<uint32_t>(length), length);
      const Result result = Generate(prompt, Sampling(24));
      ASSERT_TRUE(result.run.ok()) << result.run;
      ASSERT_TRUE(result.stream.ok()) << result.stream;
      EXPECT_EQ(result.tokens, Expected(prompt, Sampling(24))) << preset << " " << length;
      EXPECT_EQ(result.receipt.bytes_moved(), Moved(KeptPages(static_cast<int64_t>(length))))
          << preset << " " << length;
      EXPECT_EQ(result.receipt.decode_selector(), "head_classes");
    }
    EXPECT_TRUE(PagesComeBack());
    TearDown();
  }
  EXPECT_LT(KeptPages(1500), DensePages(1500) / 2);
}

TEST_P(HeadClassTokensTest, RestoredHeadsBringTheirWholeContext) {
  StartWorkers(MapFile("paper"));
  reuse_.mutable_heads()->set_restore_share(0.1);
  reuse_.mutable_heads()->set_restore_threshold(0);
  for (size_t length : {500, 1500}) {
    const auto prompt = Prompt(static_cast<uint32_t>(length + 1), length);
    const Result result = Generate(prompt, Sampling(24));
    ASSERT_TRUE(result.run.ok()) << result.run;
    ASSERT_TRUE(result.stream.ok()) << result.stream;
    EXPECT_EQ(result.tokens, Expected(prompt, Sampling(24))) << length;
    EXPECT_GT(result.receipt.head_classes().restored_heads(), 0u);
    const int64_t hole = (static_cast<int64_t>(length) - 256) / 64 - 1;
    EXPECT_EQ(result.receipt.bytes_moved(),
              Moved(KeptPages(static_cast<int64_t>(length)) + hole * result.receipt.head_classes().restored_heads()));
  }
  EXPECT_TRUE(PagesComeBack());
}

// loopserve leaves out of local heads what the others do, when it is asked to.
TEST_P(HeadClassTokensTest, LinesAndClasses) {
  StartWorkers(MapFile("paper"));
  const auto prompt = Prompt(4, 1200);
  reuse_.Clear();
  reuse_.set_policy("loopserve");
  reuse_.mutable_lines()->set_line_alpha(1);
  reuse_.mutable_lines()->set_line_min_span(512);
  for (const bool classes : {false, true}) {
    reuse_.mutable_lines()->set_head_classes(classes);
    const Result result = Generate(prompt, Sampling(16));
    ASSERT_TRUE(result.run.ok() && result.stream.ok()) << result.run << result.stream;
    EXPECT_EQ(result.receipt.bytes_moved(), Moved(classes ? KeptPages(1200) : DensePages(1200)));
    EXPECT_EQ(result.receipt.decode_selector(), classes ? "head_classes" : "dense");
    EXPECT_EQ(result.tokens, Expected(prompt, Sampling(16)));
    EXPECT_LT(result.receipt.lines().heads(), classes ? 40u : 41u);
  }
  EXPECT_TRUE(PagesComeBack());
}

TEST_P(HeadClassWorkersTest, WhatNeedsEverythingGetsEverything) {
  StartWorkers(MapFile("paper"));
  const auto prompt = Prompt(3, 700);
  v1::ReuseOptions full = reuse_, exact;
  full.mutable_heads()->set_full_kv(true);
  full.mutable_heads()->set_restore_share(0.1);
  full.mutable_heads()->set_restore_threshold(0);
  exact.set_policy("exact");
  for (const v1::ReuseOptions& reuse : {full, exact}) {
    reuse_ = reuse;
    const Result result = Generate(prompt, Sampling(20));
    ASSERT_TRUE(result.run.ok() && result.stream.ok()) << result.run << result.stream;
    EXPECT_EQ(result.receipt.bytes_moved(), Bytes(DensePages(700)));
    EXPECT_EQ(result.receipt.decode_selector(), "dense");
    EXPECT_EQ(result.tokens, Expected(prompt, Sampling(20)));
  }
  EXPECT_TRUE(PagesComeBack());
}

TEST_P(HeadClassWorkersTest, DamageIsFoundInWhatIsKept) {
  StartWorkers(MapFile("safe"));
  uint32_t seed = 70;
  for (const char* fault : {"decode.land", "prefill.commit", "prefill.push"}) {
    FaultAction action{.kind = std::string(fault) == "prefill.push" ? FaultKind::kDrop : FaultKind::kCorrupt};
    ASSERT_TRUE(ArmFault(fault, action).ok()) << fault;
    const Result result = Generate(Prompt(seed++, 900), Sampling(10));
    EXPECT_EQ(result.stream.code(), absl::StatusCode::kDataLoss) << fault << ": " << result.stream;
    DisarmAllFaults();
    EXPECT_TRUE(PagesComeBack()) << fault;
  }
}

TEST_P(HeadClassWorkersTest, TicketsWithHolesAreChecked) {
  StartWorkers(MapFile("safe"));
  reuse_.mutable_heads()->set_restore_share(0.1);
  const auto prompt = Prompt(8, 1000);
  auto ticket = Reserve(prompt, Sampling(5));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  ASSERT_EQ(ticket->page_ids_size(), KeptPages(1000));
  ASSERT_EQ(ticket->hole_begin_size(), 48);
  EXPECT_EQ(ticket->spare_page_ids_size() % ticket->pages_per_spare(), 0u);
  EXPECT_GT(ticket->spare_page_ids_size(), 0);
  const auto run = [&](const v1::Ticket& t) {
    grpc::ClientContext context;
    v1::PrefillResponse response;
    return FromGrpcStatus(prefill_stub_->Run(&context, RunRequest(prompt, Sampling(5), t), &response));
  };
  int local = 0;
  while (ticket->hole_end(local) == 0) ++local;
  v1::Ticket larger = *ticket, global = *ticket, few = *ticket, spares = *ticket, pages = *ticket;
  larger.set_hole_end(local, ticket->hole_end(local) + 1);
  larger.mutable_page_ids()->RemoveLast();
  global.set_hole_begin(0, 1);
  global.set_hole_end(0, 2);
  global.mutable_page_ids()->RemoveLast();
  few.mutable_hole_end()->RemoveLast();
  spares.mutable_spare_page_ids()->RemoveLast();
  pages.mutable_page_ids()->RemoveLast();
  for (const v1::Ticket& wrong : {larger, global, few, spares, pages})
    EXPECT_EQ(run(wrong).code(), absl::StatusCode::kInvalidArgument) << run(wrong);
  // A request that needs everything does not go into such a ticket.
  reuse_.set_policy("exact");
  EXPECT_EQ(run(*ticket).code(), absl::StatusCode::kInvalidArgument);
  reuse_.set_policy("redknot");
  reuse_.set_decode("dense");
  EXPECT_EQ(Reserve(prompt, Sampling(5)).status().code(), absl::StatusCode::kInvalidArgument);
}

// Where a write costs more than the pages that it would save, everything is sent; tokens are the same.
TEST_P(HeadClassWorkersTest, WhatDoesNotPayIsNotLeftOut) {
  StartWorkers(MapFile("paper"));
  const auto prompt = Prompt(31, 900);  // a hole of 9 pages a head
  const double page_s = static_cast<double>(model_->page_bytes()) / 1e9;
  for (const auto& [write_s, pages] : {std::pair{4.4 * page_s, KeptPages(900)}, {4.6 * page_s, DensePages(900)}}) {
    kv_bytes_per_s_ = 1e9;
    kv_write_s_ = write_s;
    const Result result = Generate(prompt, Sampling(24));
    ASSERT_TRUE(result.run.ok() && result.stream.ok()) << result.run << result.stream;
    EXPECT_EQ(result.receipt.bytes_moved(), Bytes(pages)) << write_s;
    EXPECT_EQ(result.tokens, Expected(prompt, Sampling(24))) << write_s;
  }
  // What the self-test measured is a number that one can decide by.
  EXPECT_GT(connected_.bytes_per_s(), 1e6);
  EXPECT_GE(connected_.write_seconds(), 0);
  EXPECT_LT(connected_.write_seconds(), 1e-2);
  std::printf("%s: %.2f GB/s, %.2f us a write\n", carrier_.c_str(), connected_.bytes_per_s() / 1e9,
              connected_.write_seconds() * 1e6);
  EXPECT_TRUE(PagesComeBack());
}

TEST_P(HeadClassWorkersTest, OtherHeadClassesAreNotConnected) {
  StartWorkers(MapFile("safe"), MapFile("paper"));
  const absl::Status refused = Connect();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  for (const char* preset : {"safe", "paper"}) {
    const auto digest = engine::HeadClassMap::Load(MapFile(preset))->digest();
    EXPECT_THAT(refused.ToString(), testing::HasSubstr(HexEncode(digest)));
  }
  TearDown();
  StartWorkers("none", MapFile("paper"));
  EXPECT_THAT(Connect().ToString(), testing::HasSubstr("none"));
  reuse_.set_policy("redknot");
  TearDown();
  StartWorkers("none");
  EXPECT_EQ(Reserve(Prompt(1, 100), Sampling(5)).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_P(HeadClassWorkersTest, MoreSequencesFit) {
  for (const char* preset : {"safe", "paper"}) {
    std::map<bool, int> fit;
    int64_t pool_pages = 0;
    for (const bool full : {true, false}) {
      StartWorkers(MapFile(preset));
      pool_pages = decode_->pool().num_pages();
      reuse_.mutable_heads()->set_full_kv(full);
      int& count = fit[full];
      while (Reserve(Prompt(1, 2000), Sampling(5)).ok()) ++count;
      TearDown();
    }
    // What a sequence takes of the fullest rank, and a page for each stream's first step when the last one is let in.
    const int ranks = GetParam().decode_ranks;
    const int64_t room = pool_pages / ranks - 48 / ranks;
    const auto kept = engine::PagesByRank({12, 4}, Classes().get(), ranks, 2000);
    EXPECT_EQ(std::accumulate(kept.begin(), kept.end(), int64_t{0}), KeptPages(2000));
    EXPECT_EQ(fit[true], room / (DensePages(2000) / ranks)) << preset;
    EXPECT_EQ(fit[false], room / *std::max_element(kept.begin(), kept.end())) << preset;
    // With a head a rank, one of them may have no local head at all.
    if (ranks < 4) {
      EXPECT_GT(fit[false], fit[true]) << preset;
    }
  }
}

// What lies in the decode worker's pages is what a prefill engine of its own computes, byte for byte.
TEST_P(HeadClassWorkersTest, EveryKeptPageArrivesAsItWasComputed) {
  StartWorkers(MapFile("paper"));
  const auto prompt = Prompt(21, 900);
  auto memory = *engine::AllocateKvMemory(*LoadOnce(GetParam().prefill_ranks, MapFile("paper")), DensePages(2048));
  auto engine = *engine::PrefillEngine::Create(LoadOnce(GetParam().prefill_ranks, MapFile("paper")), memory.pages, {});
  std::promise<engine::PrefillOutcome> promise;
  engine::PrefillRequest request;
  request.tokens = prompt;
  request.sampling = wire::FromProto(Sampling(1));
  request.reuse = wire::FromProto(reuse_);
  request.on_done = [&](const absl::Status& status, engine::PrefillOutcome outcome) {
    EXPECT_TRUE(status.ok()) << status;
    promise.set_value(std::move(outcome));
  };
  ASSERT_TRUE(engine->Submit(std::move(request)).ok());
  const engine::PrefillOutcome computed = promise.get_future().get();

  const auto ticket = *Reserve(prompt, Sampling(1));
  grpc::ClientContext stream_context, run_context;
  v1::StreamRequest stream_request;
  stream_request.set_ticket_id(ticket.ticket_id());
  stream_request.set_generation(ticket.generation());
  auto reader = decode_stub_->Stream(&stream_context, stream_request);
  v1::PrefillResponse response;
  ASSERT_TRUE(prefill_stub_->Run(&run_context, RunRequest(prompt, Sampling(1), ticket), &response).ok());
  v1::StreamChunk chunk;
  while (reader->Read(&chunk)) continue;
  const absl::Status ended = FromGrpcStatus(reader->Finish());
  ASSERT_TRUE(ended.ok()) << ended;
  // The sequence has ended with its first token; nobody has written its pages since.
  const size_t page_bytes = model_->page_bytes();
  std::vector<std::byte> ours(page_bytes), theirs(page_bytes);
  int next = 0, last_page = (900 - 1) / 64;
  const size_t row_bytes = page_bytes / 2 / 64;
  for (int32_t stream = 0; stream < 48; ++stream) {
    const auto pages = computed.kv->streams()[static_cast<size_t>(stream)];
    for (int32_t page = 0; page <= last_page; ++page) {
      if (page >= static_cast<int32_t>(ticket.hole_begin(stream)) &&
          page < static_cast<int32_t>(ticket.hole_end(stream)))
        continue;
      const auto id = static_cast<int32_t>(ticket.page_ids(next++));
      ASSERT_TRUE(decode_->pool().ReadPages({&id, 1}, theirs.data()).ok());
      ASSERT_TRUE(computed.kv->pool().ReadPages({&pages[static_cast<size_t>(page)], 1}, ours.data()).ok());
      // Behind the last token there is whatever was there before.
      const size_t bytes = (page == last_page ? 900 % 64 : 64) * row_bytes;
      for (const size_t half : {size_t{0}, page_bytes / 2})
        ASSERT_EQ(std::memcmp(ours.data() + half, theirs.data() + half, bytes), 0) << stream << " page " << page;
    }
  }
  EXPECT_EQ(next, ticket.page_ids_size());
  engine->Stop();
}

const std::vector<Way> kWays = {
    {"shm", false, "shm"},       {"device", true, "device", 2, 1}, {"tcp", true, "staged+tcp", 2, 4},
    {"tcp", false, "tcp"},       {"device", true, "device"},       {"shm", true, "dma+shm"},
    {"tcp", true, "staged+tcp"}, {"shm", false, "shm", 1, 2}};
INSTANTIATE_TEST_SUITE_P(Carriers, HeadClassWorkersTest, testing::ValuesIn(FewOf(2, kWays)), WayName);
INSTANTIATE_TEST_SUITE_P(Carriers, HeadClassTokensTest, testing::ValuesIn(FewOf(2, kWays)), WayName);
INSTANTIATE_TEST_SUITE_P(OnePool, HeadClassTokensTest, testing::Values(Way{"in place", false, "in place"}), WayName);

}  // namespace
}  // namespace spl
