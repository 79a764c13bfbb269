// A prefill and a decode worker, connected by gRPC and the KV transport, driven as the router drives them: whatever
// carrier moves the KV and whatever goes wrong on the way, a token is never wrong and no page is lost.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <tuple>

#include "kernels/common/backend.h"
#include "services/base/fault_point.h"
#include "services/base/grpc_status.h"
#include "services/base/status.h"
#include "services/decode/decode_server.h"
#include "services/prefill/prefill_server.h"
#include "services/wire/convert.h"
#include "tests/support/fake_device_backend.h"
#include "tests/support/paths.h"

namespace spl {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// Which way the KV goes. With a device the pools cannot be reached by the host.
struct Way {
  const char* kv_transport;
  bool device;
  const char* carrier;                      // what the workers say they use
  int prefill_ranks = 1, decode_ranks = 1;  // of tensor parallelism
  // Ranks add up in another order than the plain model. In bf16 that turns a token of a random prompt now and then; in
  // f32 arithmetic with f32 KV it does not.
  bool f32() const { return prefill_ranks * decode_ranks > 1; }
};

class WorkersTest : public testing::TestWithParam<Way> {
 protected:
  static std::shared_ptr<const engine::Model> LoadOnce(int ranks) {
    const bool device = GetParam().device, f32 = GetParam().f32();
    static std::map<std::tuple<bool, bool, int>, std::shared_ptr<const engine::Model>> models;
    auto& model = models[{device, f32, ranks}];
    if (model == nullptr) {
      const kernels::CpuBackendOptions cpu{f32 ? kernels::GemmCompute::kF32 : kernels::GemmCompute::kAuto};
      engine::ModelOptions options;
      if (f32) options.kv_dtype = kernels::DType::kF32;
      engine::Devices devices;
      for (int rank = 0; rank < ranks; ++rank) {
        if (device)
          devices.push_back(std::make_shared<test::FakeDeviceBackend>(cpu));
        else
          devices.push_back(kernels::MakeCpuBackend(cpu));
      }
      auto loaded = engine::Model::Load(test::kTinyModel, devices, options);
      EXPECT_TRUE(loaded.ok()) << loaded.status();
      model = *loaded;
    }
    return model;
  }

  void SetUp() override {
    model_ = LoadOnce(1);
    const uint64_t twice = GetParam().f32() ? 2 : 1;  // pages are twice as large
    decode::DecodeServerOptions d;
    d.worker_id = "d";
    d.metrics_listen = "";
    d.kv_bytes = twice * (128 << 20);
    d.drain_timeout = 500ms;
    d.transport.carriers = std::string(GetParam().kv_transport) == "device" ? "auto" : GetParam().kv_transport;
    d.landing_bytes = twice * (96 << 20);
    auto decode = decode::DecodeServer::Start(LoadOnce(GetParam().decode_ranks), d);
    ASSERT_TRUE(decode.ok()) << decode.status();
    decode_ = std::move(*decode);
    prefill::PrefillServerOptions p;
    p.worker_id = "p";
    p.metrics_listen = "";
    p.kv_bytes = twice * (128 << 20);
    p.SetKvTransport(GetParam().kv_transport);
    p.staging_bytes = 4 << 20;      // less than one prompt: it is used in turns
    p.engine.prefix_cache = false;  // every page of a finished request must be free again
    auto prefill = prefill::PrefillServer::Start(LoadOnce(GetParam().prefill_ranks), p);
    ASSERT_TRUE(prefill.ok()) << prefill.status();
    prefill_ = std::move(*prefill);
    decode_stub_ =
        v1::Decode::NewStub(grpc::CreateChannel(decode_->grpc_address(), grpc::InsecureChannelCredentials()));
    prefill_stub_ =
        v1::Prefill::NewStub(grpc::CreateChannel(prefill_->grpc_address(), grpc::InsecureChannelCredentials()));
    const absl::Status connected = Connect();
    ASSERT_TRUE(connected.ok()) << connected;
  }
  void TearDown() override {
    DisarmAllFaults();
    if (prefill_) prefill_->Stop();
    if (decode_) decode_->Stop();
  }

  absl::Status Connect() {
    v1::DecodeInfo info;
    v1::ConnectPeerRequest request;
    v1::ConnectPeerResponse response;
    {
      grpc::ClientContext context;
      SPLICE_RETURN_IF_ERROR(FromGrpcStatus(decode_stub_->GetInfo(&context, {}, &info)));
    }
    *request.mutable_endpoint() = info.endpoint();
    grpc::ClientContext context;
    SPLICE_RETURN_IF_ERROR(FromGrpcStatus(prefill_stub_->ConnectPeer(&context, request, &response)));
    carrier_ = response.transport();
    return absl::OkStatus();
  }

  static v1::SamplingParams Sampling(uint32_t max_tokens) {
    v1::SamplingParams sampling;
    sampling.set_temperature(0);
    sampling.set_max_tokens(max_tokens);
    sampling.set_ignore_eos(true);
    return sampling;
  }
  static std::vector<int32_t> Prompt(uint32_t seed, size_t length) {
    std::mt19937 random(seed);
    std::vector<int32_t> prompt(length);
    for (int32_t& token : prompt) token = static_cast<int32_t>(random() % 4000);
    return prompt;
  }

  absl::StatusOr<v1::Ticket> Reserve(const std::vector<int32_t>& prompt, const v1::SamplingParams& sampling,
                                     uint32_t ttl_ms = 0) {
    v1::ReserveRequest request;
    request.set_prompt_tokens(static_cast<uint32_t>(prompt.size()));
    *request.mutable_sampling() = sampling;
    request.set_model_fingerprint(wire::ToBytes(model_->fingerprint()));
    request.set_ttl_ms(ttl_ms);
    v1::Ticket ticket;
    grpc::ClientContext context;
    SPLICE_RETURN_IF_ERROR(FromGrpcStatus(decode_stub_->Reserve(&context, request, &ticket)));
    return ticket;
  }

  static v1::PrefillRequest RunRequest(const std::vector<int32_t>& prompt, const v1::SamplingParams& sampling,
                                       const v1::Ticket& ticket) {
    v1::PrefillRequest request;
    request.mutable_token_ids()->Assign(prompt.begin(), prompt.end());
    *request.mutable_sampling() = sampling;
    *request.mutable_ticket() = ticket;
    request.set_namespace_key(std::string(32, 'n'));
    return request;
  }

  // The router's part for one request. The stream is opened before the prefill runs, as the router does.
  struct Result {
    absl::Status run, stream;
    std::vector<int32_t> tokens;
    v1::Receipt receipt;
  };
  Result Generate(const std::vector<int32_t>& prompt, const v1::SamplingParams& sampling) {
    Result result;
    auto ticket = Reserve(prompt, sampling);
    if (!ticket.ok()) {
      result.run = ticket.status();
      return result;
    }
    grpc::ClientContext stream_context, run_context;
    v1::StreamRequest stream_request;
    stream_request.set_ticket_id(ticket->ticket_id());
    stream_request.set_generation(ticket->generation());
    auto reader = decode_stub_->Stream(&stream_context, stream_request);
    v1::PrefillResponse response;
    result.run = FromGrpcStatus(prefill_stub_->Run(&run_context, RunRequest(prompt, sampling, *ticket), &response));
    if (!result.run.ok()) {
      stream_context.TryCancel();
      result.stream = FromGrpcStatus(reader->Finish());
      return result;
    }
    result.receipt = response.receipt();
    result.tokens.push_back(static_cast<int32_t>(response.first_tokens(0).token_id()));
    v1::StreamChunk chunk;
    while (reader->Read(&chunk)) {
      for (const auto& token : chunk.tokens()) result.tokens.push_back(static_cast<int32_t>(token.token().token_id()));
    }
    result.stream = FromGrpcStatus(reader->Finish());
    return result;
  }

  static std::vector<int32_t> Expected(const std::vector<int32_t>& prompt, const v1::SamplingParams& sampling) {
    auto generator = engine::LocalGenerator::Create(model_, {.max_tokens = 4096});
    std::vector<int32_t> tokens;
    EXPECT_TRUE((*generator)
                    ->Generate(prompt, wire::FromProto(sampling),
                               [&](int32_t, const engine::SampledToken& t) {
                                 tokens.push_back(t.token);
                                 return true;
                               })
                    .ok());
    return tokens;
  }

  // Both pools are empty again within `limit`.
  bool PagesComeBack(std::chrono::milliseconds limit = 5s) {
    const auto deadline = Clock::now() + limit;
    std::mutex mutex;
    std::condition_variable never;
    std::unique_lock lock(mutex);
    while (Clock::now() < deadline) {
      if (decode_->pool().num_free() == decode_->pool().num_pages() &&
          prefill_->pool().num_free() == prefill_->pool().num_pages())
        return true;
      never.wait_for(lock, 2ms);
    }
    return false;
  }

  static inline std::shared_ptr<const engine::Model> model_;
  std::unique_ptr<decode::DecodeServer> decode_;
  std::unique_ptr<prefill::PrefillServer> prefill_;
  std::unique_ptr<v1::Decode::Stub> decode_stub_;
  std::unique_ptr<v1::Prefill::Stub> prefill_stub_;
  std::string carrier_;
};

TEST_P(WorkersTest, TokensEqualThePlainModelForEveryPageEdge) {
  EXPECT_EQ(carrier_, GetParam().carrier);
  for (size_t length : {1, 63, 64, 65, 255, 256, 257, 600}) {
    const auto prompt = Prompt(static_cast<uint32_t>(length), length);
    const Result result = Generate(prompt, Sampling(12));
    ASSERT_TRUE(result.run.ok()) << result.run;
    ASSERT_TRUE(result.stream.ok()) << result.stream;
    EXPECT_EQ(result.tokens, Expected(prompt, Sampling(12))) << length;
    EXPECT_EQ(result.receipt.computed_tokens(), length);
    EXPECT_EQ(result.receipt.bytes_moved(),
              engine::PagesForTokens(model_->config(), static_cast<int64_t>(length)) * model_->page_bytes());
  }
  EXPECT_TRUE(PagesComeBack());
}

TEST_P(WorkersTest, ConcurrentRequestsDoNotMix) {
  std::vector<std::thread> threads;
  std::vector<Result> results(12);
  for (size_t i = 0; i < results.size(); ++i)
    threads.emplace_back(
        [&, i] { results[i] = Generate(Prompt(static_cast<uint32_t>(i), 50 + 37 * i), Sampling(20)); });
  for (auto& thread : threads) thread.join();
  for (size_t i = 0; i < results.size(); ++i) {
    ASSERT_TRUE(results[i].run.ok() && results[i].stream.ok()) << results[i].run << results[i].stream;
    EXPECT_EQ(results[i].tokens, Expected(Prompt(static_cast<uint32_t>(i), 50 + 37 * i), Sampling(20))) << i;
  }
  EXPECT_TRUE(PagesComeBack());
}

TEST_P(WorkersTest, DamagedKvIsFoundBeforeItIsUsed) {
  uint32_t seed = 20;  // another prompt each time: the pages may still hold the right bytes of the one before
  for (const char* fault : {"decode.land", "prefill.commit", "prefill.push"}) {
    FaultAction action{.kind = std::string(fault) == "prefill.push" ? FaultKind::kDrop : FaultKind::kCorrupt};
    ASSERT_TRUE(ArmFault(fault, action).ok()) << fault;
    const Result result = Generate(Prompt(seed++, 200), Sampling(10));
    EXPECT_TRUE(result.run.ok()) << fault << result.run;  // the first token is right: it never left the prefill worker
    EXPECT_EQ(result.stream.code(), absl::StatusCode::kDataLoss) << fault << ": " << result.stream;
    EXPECT_EQ(result.tokens.size(), 1u) << fault;
    DisarmAllFaults();
    EXPECT_TRUE(PagesComeBack()) << fault;
  }
  const Result after = Generate(Prompt(9, 200), Sampling(10));
  EXPECT_EQ(after.tokens, Expected(Prompt(9, 200), Sampling(10)));
}

TEST_P(WorkersTest, CancellingThePrefillFreesBothSidesWithin100Ms) {
  const auto prompt = Prompt(3, 2000);
  auto ticket = Reserve(prompt, Sampling(10));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  grpc::ClientContext context;
  v1::PrefillResponse response;
  ASSERT_TRUE(ArmFault("prefill.push", {.kind = FaultKind::kNone}).ok());  // only counts: the first layer was pushed
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  grpc::Status status;
  const auto request = RunRequest(prompt, Sampling(10), *ticket);
  prefill_stub_->async()->Run(&context, &request, &response, [&](const grpc::Status& s) {
    std::lock_guard lock(mutex);
    status = s;
    done = true;
    changed.notify_all();
  });
  ASSERT_TRUE(WaitForFaultHits("prefill.push", 1, 20'000));
  const auto cancelled = Clock::now();
  context.TryCancel();
  EXPECT_TRUE(PagesComeBack());
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - cancelled);
  std::printf("%s: pages back after %lld ms\n", GetParam().carrier, static_cast<long long>(took.count()));
  // Cancelling takes effect between two layers, and f32 products take several times as long.
  EXPECT_LT(took, GetParam().f32() ? 400ms : 100ms);
  std::unique_lock lock(mutex);
  ASSERT_TRUE(changed.wait_for(lock, 10s, [&] { return done; }));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::CANCELLED);
}

TEST_P(WorkersTest, CancellingTheStreamFreesThePages) {
  const auto prompt = Prompt(4, 100);
  auto ticket = Reserve(prompt, Sampling(5000));
  ASSERT_TRUE(ticket.ok());
  grpc::ClientContext stream_context, run_context;
  v1::StreamRequest stream_request;
  stream_request.set_ticket_id(ticket->ticket_id());
  stream_request.set_generation(ticket->generation());
  auto reader = decode_stub_->Stream(&stream_context, stream_request);
  v1::PrefillResponse response;
  ASSERT_TRUE(prefill_stub_->Run(&run_context, RunRequest(prompt, Sampling(5000), *ticket), &response).ok());
  v1::StreamChunk chunk;
  ASSERT_TRUE(reader->Read(&chunk));
  const auto cancelled = Clock::now();
  stream_context.TryCancel();
  EXPECT_TRUE(PagesComeBack());
  EXPECT_LT(Clock::now() - cancelled, 100ms);
  EXPECT_FALSE(reader->Finish().ok());
}

TEST_P(WorkersTest, AnExpiredTicketIsRefusedAndItsPagesReturn) {
  const auto prompt = Prompt(5, 100);
  auto ticket = Reserve(prompt, Sampling(5), /*ttl_ms=*/300);
  ASSERT_TRUE(ticket.ok());
  EXPECT_TRUE(PagesComeBack());  // expiry plus one ttl of quarantine
  grpc::ClientContext context;
  v1::CommitRequest commit;
  commit.set_ticket_id(ticket->ticket_id());
  commit.set_generation(ticket->generation());
  v1::CommitResponse response;
  EXPECT_EQ(decode_stub_->Commit(&context, commit, &response).error_code(), grpc::StatusCode::NOT_FOUND);
  // A prefill worker does not write after the lease it was given.
  auto late = Reserve(prompt, Sampling(5));
  ASSERT_TRUE(late.ok());
  late->set_ttl_ms(1);
  grpc::ClientContext run_context;
  v1::PrefillResponse run_response;
  (void)prefill_stub_->Run(&run_context, RunRequest(prompt, Sampling(5), *late), &run_response);
  EXPECT_TRUE(PagesComeBack());
}

TEST_P(WorkersTest, ReleasingATicketDependsOnItsWriter) {
  const auto prompt = Prompt(6, 100);
  auto ticket = Reserve(prompt, Sampling(5));
  ASSERT_TRUE(ticket.ok());
  const auto release = [&](bool quiet) {
    grpc::ClientContext context;
    v1::ReleaseRequest request;
    request.set_ticket_id(ticket->ticket_id());
    request.set_generation(ticket->generation());
    request.set_writer_quiet(quiet);
    v1::ReleaseResponse response;
    EXPECT_TRUE(decode_stub_->Release(&context, request, &response).ok());
  };
  release(false);  // somebody may still write: the pages must not be given to others
  EXPECT_LT(decode_->pool().num_free(), decode_->pool().num_pages());
  release(true);
  EXPECT_EQ(decode_->pool().num_free(), decode_->pool().num_pages());
  release(true);  // idempotent
}

TEST_P(WorkersTest, TicketsAreChecked) {
  const auto prompt = Prompt(7, 100);
  auto ticket = Reserve(prompt, Sampling(5));
  ASSERT_TRUE(ticket.ok());
  const auto run = [&](const v1::Ticket& t) {
    grpc::ClientContext context;
    v1::PrefillResponse response;
    return FromGrpcStatus(prefill_stub_->Run(&context, RunRequest(prompt, Sampling(5), t), &response));
  };
  v1::Ticket wrong_page = *ticket, short_ticket = *ticket, wrong_epoch = *ticket;
  wrong_page.set_page_ids(3, 1u << 30);
  short_ticket.mutable_page_ids()->RemoveLast();
  wrong_epoch.set_epoch(ticket->epoch() + 1);
  EXPECT_EQ(run(wrong_page).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(run(short_ticket).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(run(wrong_epoch).code(), absl::StatusCode::kUnavailable);
}

TEST_P(WorkersTest, TooLargeAndTooManyAreDifferentErrors) {
  EXPECT_EQ(Reserve(Prompt(1, 16384), Sampling(1)).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Reserve(Prompt(1, 12000), Sampling(1)).status().code(), absl::StatusCode::kInvalidArgument);  // > pool
  auto big = Reserve(Prompt(1, 8000), Sampling(1));
  ASSERT_TRUE(big.ok()) << big.status();
  EXPECT_EQ(Reserve(Prompt(1, 8000), Sampling(1)).status().code(), absl::StatusCode::kResourceExhausted);
}

std::string WayName(const testing::TestParamInfo<Way>& info) {
  std::string name = info.param.carrier;
  std::replace(name.begin(), name.end(), '+', '_');
  if (info.param.prefill_ranks * info.param.decode_ranks > 1)
    name += "_tp" + std::to_string(info.param.prefill_ranks) + "_to_tp" + std::to_string(info.param.decode_ranks);
  return name;
}

INSTANTIATE_TEST_SUITE_P(Carriers, WorkersTest,
                         testing::Values(Way{"shm", false, "shm"}, Way{"tcp", false, "tcp"},
                                         Way{"device", true, "device"}, Way{"shm", true, "dma+shm"},
                                         Way{"tcp", true, "staged+tcp"}),
                         WayName);

// Every page comes to where the other side looks for it, however many parts the two pools have.
INSTANTIATE_TEST_SUITE_P(TensorParallel, WorkersTest,
                         testing::Values(Way{"shm", false, "shm", 2, 1}, Way{"shm", false, "shm", 1, 2},
                                         Way{"tcp", false, "tcp", 4, 2}, Way{"device", true, "device", 2, 1},
                                         Way{"device", true, "device", 1, 2}, Way{"device", true, "device", 2, 4},
                                         Way{"shm", true, "dma+shm", 2, 1}, Way{"tcp", true, "staged+tcp", 1, 2}),
                         WayName);

}  // namespace
}  // namespace spl
