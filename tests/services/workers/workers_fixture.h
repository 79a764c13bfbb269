// A prefill and a decode worker, connected by gRPC and the KV transport, driven as the router drives them.
#pragma once

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <future>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <tuple>

#include "kernels/backend/backend.h"
#include "kernels/backend/cuda/cuda_plugin.h"
#include "services/base/fault_point.h"
#include "services/base/grpc_status.h"
#include "services/base/ids.h"
#include "services/base/status.h"
#include "services/decode/decode_server.h"
#include "services/prefill/prefill_server.h"
#include "services/wire/convert.h"
#include "tests/support/engine_devices.h"
#include "tests/support/fake_device_backend.h"
#include "tests/support/paths.h"

namespace spl {

using namespace std::chrono_literals;

// Which way the KV goes. With a device the pools cannot be reached by the host; the device is a GPU where
// SPLICE_BACKEND is cuda, and else one that the CPU plays.
struct Way {
  const char* kv_transport;
  bool device;
  const char* carrier;                      // what the workers say they use
  int prefill_ranks = 1, decode_ranks = 1;  // of tensor parallelism
  // Ranks add up in another order than the plain model. In bf16 that turns a token of a random prompt now and then; in
  // f32 arithmetic with f32 KV it does not.
  bool f32() const { return prefill_ranks * decode_ranks > 1; }
  bool in_place() const { return std::string_view(kv_transport) == "in place"; }  // one pool for both workers
};

// The first `few`, which differ most, unless SPLICE_TEST_ALL_WAYS is set (./dev test --full): each way is servers that
// start for every test.
inline std::vector<Way> FewOf(size_t few, std::vector<Way> ways) {
  if (std::getenv("SPLICE_TEST_ALL_WAYS") == nullptr) ways.resize(std::min(few, ways.size()));
  return ways;
}

class WorkersTest : public ::testing::TestWithParam<Way> {
 protected:
  static std::shared_ptr<const engine::Model> LoadOnce(int ranks, const std::string& head_classes = "none") {
    const bool device = GetParam().device, f32 = GetParam().f32();
    static std::map<std::tuple<bool, bool, int, std::string>, std::shared_ptr<const engine::Model>> models;
    auto& model = models[{device, f32, ranks, head_classes}];
    if (model == nullptr) {
      const kernels::CpuBackendOptions cpu{f32 ? kernels::GemmCompute::kF32 : kernels::GemmCompute::kAuto};
      engine::ModelOptions options;
      if (f32) options.kv_dtype = kernels::DType::kF32;
      options.head_classes = head_classes;
      engine::Devices devices;
      for (int rank = 0; rank < ranks; ++rank) {
        if (device && test::OnGpu())
          devices.push_back(kernels::MakeCudaBackend({.deterministic = true}).value());
        else if (device)
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

  void SetUp() override { StartWorkers("none"); }
  void StartWorkers(const std::string& head_classes) { StartWorkers(head_classes, head_classes); }
  void StartWorkers(const std::string& prefill_classes, const std::string& decode_classes) {
    model_ = LoadOnce(1, decode_classes);
    const uint64_t twice = GetParam().f32() ? 2 : 1;  // pages are twice as large
    decode::DecodeServerOptions d;
    d.worker_id = "d";
    d.metrics_listen = metrics_listen_;
    d.kv_bytes = twice * pool_bytes_;
    d.shares_pool = GetParam().in_place();
    d.itl_target = itl_target_;
    d.sharing = sharing_;
    d.engine.async_scheduling = async_scheduling_;
    d.drain_timeout = drain_timeout_;
    const std::string transport = GetParam().in_place() ? "auto" : GetParam().kv_transport;
    d.transport.carriers = transport == "device" ? "auto" : transport;
    d.landing_bytes = twice * (96 << 20);
    d.local_prefill = local_prefill_;
    d.sessions = sessions_;
    auto decode = decode::DecodeServer::Start(LoadOnce(GetParam().decode_ranks, decode_classes), d);
    ASSERT_TRUE(decode.ok()) << decode.status();
    decode_ = std::move(*decode);
    prefill::PrefillServerOptions p;
    p.worker_id = "p";
    p.metrics_listen = metrics_listen_;
    p.kv_bytes = twice * pool_bytes_;
    p.SetKvTransport(transport);
    p.staging_bytes = 4 << 20;  // less than one prompt: it is used in turns
    p.engine.prefix_cache = prefix_cache_;
    if (GetParam().in_place())
      p.neighbour = {decode_->shared(), &decode_->transport(), decode_->memory(), decode_->InProcessChannel()};
    auto prefill = prefill::PrefillServer::Start(LoadOnce(GetParam().prefill_ranks, prefill_classes), p);
    ASSERT_TRUE(prefill.ok()) << prefill.status();
    prefill_ = std::move(*prefill);
    decode_stub_ =
        v1::Decode::NewStub(grpc::CreateChannel(decode_->grpc_address(), grpc::InsecureChannelCredentials()));
    prefill_stub_ =
        v1::Prefill::NewStub(grpc::CreateChannel(prefill_->grpc_address(), grpc::InsecureChannelCredentials()));
    if (prefill_classes != decode_classes) return;
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
    connected_ = response;
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
    if (reserve_with_tokens_) request.mutable_token_ids()->Assign(prompt.begin(), prompt.end());
    *request.mutable_sampling() = sampling;
    request.set_model_fingerprint(wire::ToBytes(model_->kv_fingerprint()));
    request.set_ttl_ms(ttl_ms);
    *request.mutable_reuse() = reuse_;
    request.set_kv_bytes_per_s(kv_bytes_per_s_);
    request.set_kv_write_seconds(kv_write_s_);
    *request.mutable_writer() = connected_.writer();
    if (!session_.empty()) *request.mutable_conversation() = TurnOf(prompt);
    v1::Ticket ticket;
    grpc::ClientContext context;
    SPLICE_RETURN_IF_ERROR(FromGrpcStatus(decode_stub_->Reserve(&context, request, &ticket)));
    return ticket;
  }

  // The prompt as a turn of session_.
  v1::Conversation TurnOf(const std::vector<int32_t>& prompt) const {
    v1::Conversation turn;
    turn.set_name(session_);
    turn.set_owner(std::string(32, owner_));
    turn.set_namespace_key(std::string(32, 'n'));
    chunk::Digest namespace_key;
    namespace_key.fill('n');
    for (const chunk::ChunkKey& key : chunk::MakePrefixKeys(model_->kv_fingerprint(), namespace_key, prompt))
      turn.mutable_chunk_keys()->append(key.bytes.begin(), key.bytes.end());
    return turn;
  }

  void Release(const v1::Ticket& ticket, uint64_t generation) {
    grpc::ClientContext context;
    v1::ReleaseRequest request;
    request.set_ticket_id(ticket.ticket_id());
    request.set_generation(generation);
    request.set_writer_quiet(true);
    v1::ReleaseResponse response;
    EXPECT_TRUE(decode_stub_->Release(&context, request, &response).ok());
  }

  v1::PrefillRequest RunRequest(const std::vector<int32_t>& prompt, const v1::SamplingParams& sampling,
                                const v1::Ticket& ticket) const {
    v1::PrefillRequest request;
    request.mutable_token_ids()->Assign(prompt.begin(), prompt.end());
    *request.mutable_sampling() = sampling;
    *request.mutable_ticket() = ticket;
    request.set_namespace_key(std::string(32, 'n'));
    request.set_session(session_);
    request.set_session_owner(std::string(32, owner_));
    *request.mutable_reuse() = reuse_;
    request.mutable_segments()->Assign(segments_.begin(), segments_.end());
    return request;
  }

  // The router's part for one request. The stream is opened before the prefill runs, as the router does.
  struct Result {
    absl::Status run, stream;
    std::vector<int32_t> tokens;
    v1::Receipt receipt;
    uint64_t kv_bytes = 0;  // that the decode worker held
  };
  Result Generate(const std::vector<int32_t>& prompt, const v1::SamplingParams& sampling) {
    Result result;
    auto ticket = Reserve(prompt, sampling);
    if (!ticket.ok()) {
      result.run = ticket.status();
      return result;
    }
    return GenerateOn(*ticket, prompt, sampling);
  }
  Result GenerateOn(const v1::Ticket& ticket, const std::vector<int32_t>& prompt, const v1::SamplingParams& sampling) {
    Result result;
    grpc::ClientContext stream_context, run_context;
    v1::StreamRequest stream_request;
    stream_request.set_ticket_id(ticket.ticket_id());
    stream_request.set_generation(ticket.generation());
    auto reader = decode_stub_->Stream(&stream_context, stream_request);
    v1::PrefillResponse response;
    result.run = FromGrpcStatus(prefill_stub_->Run(&run_context, RunRequest(prompt, sampling, ticket), &response));
    if (!result.run.ok()) {
      stream_context.TryCancel();
      result.stream = FromGrpcStatus(reader->Finish());
      return result;
    }
    ReadToEnd(*reader, response, result);
    return result;
  }
  // The stream of a ticket whose prompt has been computed already: `response` is its answer.
  Result StreamBehind(const v1::Ticket& ticket, const v1::PrefillResponse& response) {
    Result result;
    grpc::ClientContext context;
    v1::StreamRequest request;
    request.set_ticket_id(ticket.ticket_id());
    request.set_generation(ticket.generation());
    ReadToEnd(*decode_stub_->Stream(&context, request), response, result);
    return result;
  }
  void ReadToEnd(grpc::ClientReaderInterface<v1::StreamChunk>& reader, const v1::PrefillResponse& response,
                 Result& result) {
    result.receipt = response.receipt();
    result.tokens.push_back(static_cast<int32_t>(response.first_tokens(0).token_id()));
    v1::StreamChunk chunk;
    while (reader.Read(&chunk)) {
      if (chunk.has_kv_bytes()) result.kv_bytes = chunk.kv_bytes();
      if (on_chunk_) on_chunk_();
      for (const auto& token : chunk.tokens()) result.tokens.push_back(static_cast<int32_t>(token.token().token_id()));
    }
    result.stream = FromGrpcStatus(reader.Finish());
  }

  // What one process without workers generates; computed once for all the ways that KV may go.
  std::vector<int32_t> Expected(const std::vector<int32_t>& prompt, const v1::SamplingParams& sampling) const {
    static std::map<std::tuple<const engine::Model*, std::string, std::string, std::vector<int32_t>>,
                    std::vector<int32_t>>
        known;
    const auto [it, is_new] =
        known.try_emplace({model_.get(), reuse_.SerializeAsString(), sampling.SerializeAsString(), prompt});
    if (is_new) it->second = Generated(prompt, sampling);
    return it->second;
  }

  std::vector<int32_t> Generated(const std::vector<int32_t>& prompt, const v1::SamplingParams& sampling) const {
    engine::LocalGeneratorOptions options{.max_tokens = 4096};
    options.reuse_options = wire::FromProto(reuse_);
    auto generator = engine::LocalGenerator::Create(model_, options);
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

  // Both pools have nothing but cached KV within `limit`.
  bool PagesComeBack(std::chrono::milliseconds limit = 5s) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    std::mutex mutex;
    std::condition_variable never;
    std::unique_lock lock(mutex);
    while (std::chrono::steady_clock::now() < deadline) {
      if (decode_->pool().num_available() == decode_->pool().num_pages() &&
          prefill_->pool().num_available() == prefill_->pool().num_pages())
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
  std::string metrics_listen_;                                  // empty: none
  uint64_t pool_bytes_ = 128 << 20;                             // of each worker, or of both
  std::optional<std::chrono::milliseconds> itl_target_ = 50ms;  // of turns; nullopt: none are taken
  std::optional<engine::StepTurns::Sharing> sharing_;           // nullopt: by the device
  std::optional<bool> async_scheduling_;                        // nullopt: by the device
  bool prefix_cache_ = false;               // without it every page of a finished request must be free again
  v1::ReuseOptions reuse_;                  // of all requests
  bool reserve_with_tokens_ = false;        // for selectors that choose by the prompt
  std::vector<v1::TokenSegment> segments_;  // of the next requests
  std::string session_;                     // the conversation of the next requests; empty: none
  char owner_ = 'o';                        // its caller
  decode::KeptPromptsOptions sessions_;     // of the decode worker
  v1::ConnectPeerResponse connected_;
  local_prefill::LocalPrefillOptions local_prefill_;  // of the decode worker
  std::chrono::milliseconds drain_timeout_{500};      // likewise
  std::function<void()> on_chunk_;                    // when tokens of a Generate have come
  double kv_bytes_per_s_ = 0, kv_write_s_ = 0;        // of reservations: the way of the KV, not known
};

inline std::string WayName(const ::testing::TestParamInfo<Way>& info) {
  std::string name = info.param.carrier;
  std::replace(name.begin(), name.end(), '+', '_');
  std::replace(name.begin(), name.end(), ' ', '_');
  if (info.param.in_place() && info.param.device) name += "_on_device";
  if (info.param.prefill_ranks * info.param.decode_ranks > 1)
    name += "_tp" + std::to_string(info.param.prefill_ranks) + "_to_tp" + std::to_string(info.param.decode_ranks);
  return name;
}

}  // namespace spl
