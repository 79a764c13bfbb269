// CPU time of a decode engine's thread between two passes of the model, while every sequence streams its tokens to a
// gRPC client, as a decode worker's do.
#include <fmt/format.h>
#include <grpcpp/grpcpp.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <memory>
#include <mutex>
#include <vector>

#include "services/base/status.h"
#include "services/decode/token_stream.h"
#include "services/engine/engine.h"
#include "services/engine/model/random_weights.h"
#include "services/wire/convert.h"
#include "services/worker_flags/worker_flags.h"
#include "spl/v1/decode.grpc.pb.h"

namespace spl {
namespace {

using Clock = std::chrono::steady_clock;

struct Flags {
  std::string shape = "models/splice-tiny/config.json";
  std::string backend = "cpu";
  std::vector<int32_t> rows = {1, 32, 128, 256};
  int32_t context = 32;
  int32_t steps = 100;
  bool streams = true;
};

// Streams of tokens by their number, as DecodeService serves them.
class StreamService final : public v1::Decode::CallbackService {
 public:
  explicit StreamService(size_t num) {
    for (size_t i = 0; i < num; ++i) streams_.push_back(std::make_shared<decode::TokenStream>(nullptr));
  }
  decode::TokenStream& stream(size_t i) { return *streams_[i]; }
  grpc::ServerWriteReactor<v1::StreamChunk>* Stream(grpc::CallbackServerContext*,
                                                    const v1::StreamRequest* request) override {
    return streams_.at(request->generation())->Attach();
  }

 private:
  std::vector<std::shared_ptr<decode::TokenStream>> streams_;
};

// Reads one stream to its end.
class Reader final : public grpc::ClientReadReactor<v1::StreamChunk> {
 public:
  Reader(v1::Decode::Stub& stub, uint64_t number, std::atomic<int64_t>& num_tokens) : num_tokens_(num_tokens) {
    request_.set_generation(number);
    stub.async()->Stream(&context_, &request_, this);
    StartRead(&chunk_);
    StartCall();
  }
  void OnReadDone(bool ok) override {
    if (!ok) return;
    num_tokens_ += chunk_.tokens_size();
    StartRead(&chunk_);
  }
  void OnDone(const grpc::Status&) override { done_.set_value(); }
  void Wait() { done_.get_future().wait(); }

 private:
  grpc::ClientContext context_;
  v1::StreamRequest request_;
  v1::StreamChunk chunk_;
  std::atomic<int64_t>& num_tokens_;
  std::promise<void> done_;
};

struct Measured {
  double step_s = 0, host_s = 0;  // a step by the clock, and the thread's CPU time outside of the model
};

class Bench {
 public:
  Bench(std::shared_ptr<const engine::Model> model, engine::PagePool& pool, const Flags& flags)
      : model_(std::move(model)), pool_(pool), flags_(flags) {}

  absl::StatusOr<Measured> Run(int32_t rows) {
    StreamService service(static_cast<size_t>(rows));
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service);
    const auto server = builder.BuildAndStart();
    const auto stub =
        v1::Decode::NewStub(grpc::CreateChannel(fmt::format("127.0.0.1:{}", port), grpc::InsecureChannelCredentials()));
    std::atomic<int64_t> num_tokens = 0;
    std::vector<std::unique_ptr<Reader>> readers;
    for (int32_t i = 0; i < rows && flags_.streams; ++i)
      readers.push_back(std::make_unique<Reader>(*stub, static_cast<uint64_t>(i), num_tokens));
    engine::DecodeEngineOptions options{.executor = {.max_rows = rows}, .max_queued = static_cast<size_t>(rows)};
    SPLICE_ASSIGN_OR_RETURN(const auto engine, engine::DecodeEngine::Create(model_, pool_, options));
    const absl::Status submitted = SubmitAll(*engine, service, rows);
    const Measured measured = submitted.ok() ? Measure(*engine, rows) : Measured();
    engine->Stop();
    for (const auto& reader : readers) reader->Wait();
    server->Shutdown();
    SPLICE_RETURN_IF_ERROR(submitted);
    return measured;
  }

 private:
  absl::Status SubmitAll(engine::DecodeEngine& engine, StreamService& service, int32_t rows) {
    for (int32_t i = 0; i < rows; ++i) {
      engine::DecodeRequest request;
      request.kv = std::make_unique<engine::SequenceKv>(pool_, engine::KvShapeOf(model_->config()));
      SPLICE_RETURN_IF_ERROR(request.kv->Reserve(flags_.context));
      request.kv->set_num_tokens(flags_.context);
      request.sampling.temperature = 0;
      request.sampling.ignore_eos = true;
      request.first_tokens = {{.token = i % model_->config().vocab_size}};
      decode::TokenStream& stream = service.stream(static_cast<size_t>(i));
      const bool streams = flags_.streams;
      request.on_tokens = [&stream, streams](const auto& tokens) {
        if (!streams) return;
        v1::StreamChunk chunk;
        for (const engine::DecodeToken& token : tokens) {
          auto* out = chunk.add_tokens();
          out->set_index(static_cast<uint32_t>(token.fork));
          *out->mutable_token() = wire::ToProto(token.token);
        }
        stream.Push(chunk);
      };
      request.on_done = [&stream](const absl::Status& status) { stream.End(status); };
      SPLICE_RETURN_IF_ERROR(engine.Submit(std::move(request)));
    }
    return absl::OkStatus();
  }

  Measured Measure(const engine::DecodeEngine& engine, int32_t rows) const {
    const auto after = [&](uint64_t steps) {
      engine::DecodeLoad load = engine.load();
      while (load.num_steps < steps || load.running < static_cast<size_t>(rows)) {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        load = engine.load();
      }
      return std::pair(load, Clock::now());
    };
    const auto [first, begin] = after(engine.load().num_steps + 20);
    const auto [last, end] = after(first.num_steps + static_cast<uint64_t>(flags_.steps));
    const auto steps = static_cast<double>(last.num_steps - first.num_steps);
    return {std::chrono::duration<double>(end - begin).count() / steps, (last.host_s - first.host_s) / steps};
  }

  const std::shared_ptr<const engine::Model> model_;
  engine::PagePool& pool_;
  const Flags& flags_;
};

absl::Status RunBench(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const engine::Devices devices, MakeDevices(flags.backend, 1));
  SPLICE_ASSIGN_OR_RETURN(const engine::RandomModel random, engine::ParseRandomModel(flags.shape));
  SPLICE_ASSIGN_OR_RETURN(const auto model, engine::Model::LoadRandom(random, devices));
  const int32_t most = *std::max_element(flags.rows.begin(), flags.rows.end());
  const int64_t positions = flags.context + 2 * (20 + int64_t{flags.steps});
  SPLICE_ASSIGN_OR_RETURN(const engine::KvMemory memory,
                          engine::AllocateKvMemory(*model, engine::PagesForTokens(model->config(), most * positions)));
  SPLICE_RETURN_IF_ERROR(devices[0]->FillRandom(
      {}, {.out = memory.buffers[0]->data(),
           .dtype = model->kv_dtype(),
           .count = static_cast<int64_t>(memory.buffers[0]->size() / kernels::DTypeBytes(model->kv_dtype())),
           .stream = 1,
           .step_exponent = -6}));
  engine::PagePool pool(memory.pages, model->backends());
  Bench bench(model, pool, flags);
  for (const int32_t rows : flags.rows) {
    SPLICE_ASSIGN_OR_RETURN(const Measured measured, bench.Run(rows));
    fmt::print("{:>4} rows: {:8.3f} ms a step, {:7.1f} us of the thread outside of the model, {:6.2f} a row\n", rows,
               measured.step_s * 1e3, measured.host_s * 1e6, measured.host_s * 1e6 / rows);
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace spl

int main(int argc, char** argv) {
  spl::Flags flags;
  CLI::App app("Times what a decode engine does between two passes of the model.");
  app.add_option("--random-weights", flags.shape, "SHAPE or config.json, with :SEED")->capture_default_str();
  app.add_option("--backend", flags.backend, "cpu, cuda or cuda:GPU")->capture_default_str();
  app.add_option("--rows", flags.rows, "sequences of the batch")->delimiter(',')->capture_default_str();
  app.add_option("--context", flags.context, "tokens of every sequence at the start")->capture_default_str();
  app.add_option("--steps", flags.steps, "steps that are measured")->capture_default_str();
  app.add_option("--streams", flags.streams, "whether a client reads the tokens over gRPC")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = spl::RunBench(flags);
  if (status.ok()) return 0;
  fmt::print(stderr, "splice_decode_host_bench: {}\n", spl::MessageOf(status));
  return 1;
}
