// What it costs to bring the KV of a long prompt from one GPU's pool to another's, by the product's own senders:
//
//   device  from GPU to GPU, beside a bare copy of as many bytes between the two
//   host    through page-locked memory of the receiving worker, beside a bare copy from the GPU to such memory
//   worker  prompt to second token through a prefill and a decode worker, beside the plain model on one GPU
//
// Every transfer is checked against the checksums of its pages.
#include <fmt/format.h>
#include <grpcpp/grpcpp.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>

#include "services/base/grpc_status.h"
#include "services/base/status.h"
#include "services/decode/decode_server.h"
#include "services/engine/engine.h"
#include "services/engine/model/random_weights.h"
#include "services/prefill/prefill_server.h"
#include "services/transport/kv_transport.h"
#include "services/wire/convert.h"
#include "services/worker_flags/worker_flags.h"
#include "tests/bench/median.h"
#include "tests/bench/page_push.h"

namespace spl {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kTimeout{60};

struct Flags {
  std::string shape = "llama-3.1-8b";
  std::string from = "cuda:0", to = "cuda:1";
  std::string kv_dtype = "auto";
  int32_t tokens = 32768;
  std::vector<int32_t> slices = {32768, 4096, 512};
  int32_t slice = 4096;  // of the worker part
  int32_t repeats = 3;
  int32_t from_tp = 1, to_tp = 1;  // of the worker part
  std::vector<std::string> parts = {"device", "host", "worker"};
  std::vector<std::string> ways = {"device", "shm"};
  uint64_t staging_bytes = 256ull << 20;
  bool tcp = false;
};

double Seconds(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }
// Bytes a second of the median of some runs; the first one warms up.
absl::StatusOr<double> Rate(int repeats, uint64_t bytes, const std::function<absl::Status()>& run) {
  std::vector<double> times;
  for (int i = 0; i <= repeats; ++i) {
    const auto start = Clock::now();
    SPLICE_RETURN_IF_ERROR(run());
    if (i > 0) times.push_back(Seconds(start));
  }
  return static_cast<double>(bytes) / Median(times);
}

// A page pool of one GPU with one sequence in it.
struct Side {
  std::shared_ptr<const kernels::Backend> backend;
  std::unique_ptr<kernels::Buffer> memory;
  std::unique_ptr<engine::PagePool> pool;
  std::unique_ptr<engine::SequenceKv> kv;
};

absl::StatusOr<Side> MakeSide(const std::string& backend, const engine::ModelConfig& c, const Flags& flags) {
  Side side;
  SPLICE_ASSIGN_OR_RETURN(side.backend, MakeBackend(backend));
  SPLICE_ASSIGN_OR_RETURN(const auto kv_dtype, KvTypeFromName(flags.kv_dtype));
  kernels::KvPoolView view{.dtype = kv_dtype.value_or(kernels::DType::kBF16), .head_dim = c.head_dim};
  view.num_pages = static_cast<int32_t>(engine::PagesForTokens(c, flags.tokens));
  SPLICE_ASSIGN_OR_RETURN(side.memory, side.backend->Allocate(view.num_pages * view.page_bytes()));
  view.base = static_cast<std::byte*>(side.memory->data());
  side.pool = std::make_unique<engine::PagePool>(view, side.backend.get());
  side.kv = std::make_unique<engine::SequenceKv>(*side.pool, engine::KvShapeOf(c));
  SPLICE_RETURN_IF_ERROR(side.kv->Reserve(flags.tokens));
  return side;
}

absl::Status Fill(Side& side, uint64_t seed) {
  return side.backend->FillRandom({}, {.out = side.memory->data(),
                                       .dtype = kernels::DType::kBF16,
                                       .count = static_cast<int64_t>(side.memory->size() / 2),
                                       .stream = seed});
}

absl::Status DevicePart(const engine::ModelConfig& c, const Flags& flags, nlohmann::json& out) {
  SPLICE_ASSIGN_OR_RETURN(Side from, MakeSide(flags.from, c, flags));
  SPLICE_ASSIGN_OR_RETURN(Side to, MakeSide(flags.to, c, flags));
  SPLICE_RETURN_IF_ERROR(Fill(from, 1));
  SPLICE_ASSIGN_OR_RETURN(const std::string handle, to.backend->Export(*to.memory));
  prefill::RemotePool remote{.pages_per_part = static_cast<uint32_t>(to.pool->num_pages())};
  SPLICE_ASSIGN_OR_RETURN(remote.parts.emplace_back().emplace_back(), from.backend->Import(handle));
  const uint64_t bytes = from.memory->size();
  const void* const source = from.memory->data();
  void* const target = remote.parts[0][0]->data();
  SPLICE_ASSIGN_OR_RETURN(const double bare, Rate(flags.repeats, bytes, [&] {
                            return from.backend->Copy(kernels::CopyKind::kWithin, target, source, bytes);
                          }));
  fmt::print("device: {:.2f} GB, bare copy {:.1f} GB/s\n", static_cast<double>(bytes) / 1e9, bare / 1e9);
  out["device"] = {{"bytes", bytes}, {"bare_bytes_per_s", bare}};
  std::vector<uint32_t> crcs(from.pool->num_pages());
  const std::vector<int32_t> all = from.kv->AllPages();
  SPLICE_ASSIGN_OR_RETURN(const double checksums,
                          Rate(flags.repeats, bytes, [&] { return from.pool->ChecksumPages(all, crcs.data()); }));
  fmt::print("device: checksums alone {:.1f} GB/s\n", checksums / 1e9);
  for (const int32_t slice : flags.slices) {
    SPLICE_RETURN_IF_ERROR(Fill(to, 2));
    const auto sender = prefill::MakeDeviceSender(remote);
    SPLICE_ASSIGN_OR_RETURN(const double rate, Rate(flags.repeats, bytes, [&] {
                              return PushPages(*sender, *from.kv, *to.kv, slice, nullptr);
                            }));
    SPLICE_RETURN_IF_ERROR(ExpectEqualPages(*from.pool, all, *to.pool, to.kv->AllPages()));
    fmt::print("device: slices of {:>6} tokens: {:7.1f} GB/s, {:5.1f} % of the bare copy\n", slice, rate / 1e9,
               100 * rate / bare);
    std::fflush(stdout);
    out["device"]["slices"].push_back({{"tokens", slice}, {"bytes_per_s", rate}, {"share", rate / bare}});
  }
  return absl::OkStatus();
}

// Landing memory of the receiving worker on the host, and a channel of the sending one to it.
absl::Status HostPart(const engine::ModelConfig& c, const Flags& flags, nlohmann::json& out) {
  SPLICE_ASSIGN_OR_RETURN(Side from, MakeSide(flags.from, c, flags));
  SPLICE_ASSIGN_OR_RETURN(Side to, MakeSide(flags.to, c, flags));
  SPLICE_RETURN_IF_ERROR(Fill(from, 3));
  const uint64_t bytes = from.memory->size();
  std::vector<std::string> carriers = {"shm"};
  if (flags.tcp) carriers.emplace_back("tcp");
  for (const std::string& carrier : carriers) {
    transport::TransportOptions options;
    options.carriers = carrier;
    SPLICE_ASSIGN_OR_RETURN(const auto reader, transport::KvTransport::Create(options));
    SPLICE_ASSIGN_OR_RETURN(const auto writer, transport::KvTransport::Create(options));
    SPLICE_ASSIGN_OR_RETURN(auto landing, reader->Allocate(bytes));
    SPLICE_RETURN_IF_ERROR(to.backend->PinHost(landing->data(), landing->size()));
    kernels::KvPoolView view = to.pool->view().rank(0);
    view.base = landing->data();
    Side host{.pool = std::make_unique<engine::PagePool>(view)};
    host.kv = std::make_unique<engine::SequenceKv>(*host.pool, engine::KvShapeOf(c));
    SPLICE_RETURN_IF_ERROR(host.kv->Reserve(flags.tokens));
    const transport::RemoteMemory remote{reader->listen_address(), landing->packed_rkey(),
                                         reinterpret_cast<uint64_t>(landing->data()), landing->size(),
                                         transport::HostId()};
    SPLICE_ASSIGN_OR_RETURN(const auto channel, writer->Connect(remote, kTimeout));
    SPLICE_ASSIGN_OR_RETURN(const double bare, Rate(flags.repeats, bytes, [&] {
                              return from.backend->Copy(kernels::CopyKind::kDownload, landing->data(),
                                                        from.memory->data(), bytes);
                            }));
    SPLICE_ASSIGN_OR_RETURN(const double bare_up, Rate(flags.repeats, bytes, [&] {
                              return to.backend->Copy(kernels::CopyKind::kUpload, to.memory->data(), landing->data(),
                                                      bytes);
                            }));
    fmt::print("host, {}: bare copies to page-locked memory {:.1f} GB/s, from it {:.1f} GB/s\n", carrier, bare / 1e9,
               bare_up / 1e9);
    std::fflush(stdout);
    std::unique_ptr<prefill::PinnedPeerMemory> pinned;
    SPLICE_ASSIGN_OR_RETURN(const auto staging_memory, writer->Allocate(flags.staging_bytes));
    SPLICE_ASSIGN_OR_RETURN(const auto staging,
                            prefill::StagingPages::Create(staging_memory->data(), staging_memory->size(),
                                                          from.pool->view().page_bytes(), *from.backend));
    std::vector<std::unique_ptr<prefill::PageSender>> senders;
    if (!channel->mapped_memory().empty()) {
      SPLICE_ASSIGN_OR_RETURN(pinned, prefill::PinnedPeerMemory::Create(channel->mapped_memory(), *from.backend));
      senders.push_back(prefill::MakeMappedSender(*channel, true));
    }
    senders.push_back(prefill::MakeStagedSender(*channel, *staging, true));
    for (const auto& sender : senders) {
      for (const int32_t slice : flags.slices) {
        const auto flush = [&] { return channel->FlushAndWait(kTimeout); };
        SPLICE_ASSIGN_OR_RETURN(const double rate, Rate(flags.repeats, bytes, [&] {
                                  return PushPages(*sender, *from.kv, *host.kv, slice, flush);
                                }));
        std::vector<const std::byte*> pages;
        for (const int32_t page : host.kv->AllPages()) pages.push_back(host.pool->view().k(page));
        const std::vector<int32_t> target = to.kv->AllPages();
        SPLICE_ASSIGN_OR_RETURN(const double landed,
                                Rate(1, bytes, [&] { return to.pool->WritePagesFrom(target, pages); }));
        SPLICE_RETURN_IF_ERROR(ExpectEqualPages(*from.pool, from.kv->AllPages(), *to.pool, target));
        fmt::print(
            "host, {}: slices of {:>6} tokens: {:6.1f} GB/s, {:5.1f} % of the bare copy; landed at {:.1f} GB/s\n",
            sender->carrier(), slice, rate / 1e9, 100 * rate / bare, landed / 1e9);
        std::fflush(stdout);
        out["host"].push_back({{"carrier", sender->carrier()},
                               {"slice", slice},
                               {"bytes_per_s", rate},
                               {"bare_bytes_per_s", bare},
                               {"share", rate / bare},
                               {"landed_bytes_per_s", landed},
                               {"bare_upload_bytes_per_s", bare_up}});
      }
    }
    pinned.reset();
    SPLICE_RETURN_IF_ERROR(channel->Close(kTimeout));
    to.backend->UnpinHost(landing->data());
    senders.clear();
    writer->Stop();
    landing.reset();
    reader->Stop();
  }
  return absl::OkStatus();
}

// Seconds from prompt to first and to second token.
struct TokenTimes {
  double first = 0, second = 0;
};
TokenTimes Medians(const std::vector<TokenTimes>& runs) {
  std::vector<double> first, second;
  for (const TokenTimes& run : runs) {
    first.push_back(run.first);
    second.push_back(run.second);
  }
  return {Median(first), Median(second)};
}

// Through the two workers.
absl::StatusOr<TokenTimes> SecondToken(v1::Decode::Stub& decode, v1::Prefill::Stub& prefill, const engine::Model& model,
                                       const std::vector<int32_t>& prompt) {
  v1::ReserveRequest reserve;
  reserve.set_prompt_tokens(static_cast<uint32_t>(prompt.size()));
  reserve.mutable_sampling()->set_temperature(0);
  reserve.mutable_sampling()->set_max_tokens(2);
  reserve.mutable_sampling()->set_ignore_eos(true);
  reserve.set_model_fingerprint(wire::ToBytes(model.kv_fingerprint()));
  v1::Ticket ticket;
  const auto start = Clock::now();
  {
    grpc::ClientContext context;
    SPLICE_RETURN_IF_ERROR(FromGrpcStatus(decode.Reserve(&context, reserve, &ticket)));
  }
  grpc::ClientContext stream_context, run_context;
  v1::StreamRequest stream;
  stream.set_ticket_id(ticket.ticket_id());
  stream.set_generation(ticket.generation());
  const auto reader = decode.Stream(&stream_context, stream);
  v1::PrefillRequest run;
  run.mutable_token_ids()->Assign(prompt.begin(), prompt.end());
  *run.mutable_sampling() = reserve.sampling();
  *run.mutable_ticket() = ticket;
  run.set_namespace_key(std::string(32, 'n'));
  v1::PrefillResponse response;
  TokenTimes times;
  SPLICE_RETURN_IF_ERROR(FromGrpcStatus(prefill.Run(&run_context, run, &response)));
  times.first = Seconds(start);
  v1::StreamChunk chunk;
  const bool read = reader->Read(&chunk);
  times.second = Seconds(start);
  while (reader->Read(&chunk)) {
  }
  SPLICE_RETURN_IF_ERROR(FromGrpcStatus(reader->Finish()));
  if (!read) return absl::InternalError("no second token came");
  return times;
}

absl::Status WorkerPart(const engine::RandomModel& random, const Flags& flags, nlohmann::json& out) {
  SPLICE_ASSIGN_OR_RETURN(const engine::Devices from, MakeDevices(flags.from, flags.from_tp));
  SPLICE_ASSIGN_OR_RETURN(const engine::Devices to, MakeDevices(flags.to, flags.to_tp));
  SPLICE_ASSIGN_OR_RETURN(const auto kv_dtype, KvTypeFromName(flags.kv_dtype));
  SPLICE_ASSIGN_OR_RETURN(const auto prefill_model, engine::Model::LoadRandom(random, from, {.kv_dtype = kv_dtype}));
  SPLICE_ASSIGN_OR_RETURN(const auto decode_model, engine::Model::LoadRandom(random, to, {.kv_dtype = kv_dtype}));
  const engine::ModelConfig& c = prefill_model->config();
  const uint64_t kv_bytes = engine::PagesForTokens(c, flags.tokens + 512) * prefill_model->page_bytes();
  const auto prompt_of = [&](int32_t seed) {
    std::vector<int32_t> prompt(flags.tokens);
    for (int32_t i = 0; i < flags.tokens; ++i)
      prompt[i] = static_cast<int32_t>((seed * 104729ll + i * 7919ll) % c.vocab_size);
    return prompt;
  };
  TokenTimes plain;
  {
    SPLICE_ASSIGN_OR_RETURN(const auto generator,
                            engine::LocalGenerator::Create(prefill_model, {.executor = {.max_rows = flags.slice},
                                                                           .max_tokens = flags.tokens + 8}));
    std::vector<TokenTimes> times;
    for (int i = 0; i <= flags.repeats; ++i) {
      engine::SamplingParams sampling;
      sampling.temperature = 0;
      sampling.max_tokens = 2;
      sampling.ignore_eos = true;
      const std::vector<int32_t> prompt = prompt_of(i);
      TokenTimes run;
      const auto start = Clock::now();
      SPLICE_RETURN_IF_ERROR(generator->Generate(prompt, sampling, [&](int32_t, const engine::SampledToken&) {
        (run.first == 0 ? run.first : run.second) = Seconds(start);
        return true;
      }));
      if (i > 0) times.push_back(run);
    }
    plain = Medians(times);
  }
  fmt::print("worker: prompt of {}, plain model: first token {:.1f} ms, second {:.1f} ms\n", flags.tokens,
             plain.first * 1e3, plain.second * 1e3);
  std::fflush(stdout);
  for (const std::string& way : flags.ways) {
    decode::DecodeServerOptions d;
    d.metrics_listen = "";
    d.kv_bytes = kv_bytes;
    d.landing_bytes = kv_bytes;
    d.transport.carriers = way == "device" ? "auto" : way;
    SPLICE_ASSIGN_OR_RETURN(const auto decode, decode::DecodeServer::Start(decode_model, d));
    prefill::PrefillServerOptions p;
    p.metrics_listen = "";
    p.kv_bytes = kv_bytes;
    p.SetKvTransport(way);
    p.staging_bytes = flags.staging_bytes;
    p.engine.executor.max_rows = flags.slice;
    p.engine.prefix_cache = false;
    SPLICE_ASSIGN_OR_RETURN(const auto prefill, prefill::PrefillServer::Start(prefill_model, p));
    const auto decode_stub =
        v1::Decode::NewStub(grpc::CreateChannel(decode->grpc_address(), grpc::InsecureChannelCredentials()));
    const auto prefill_stub =
        v1::Prefill::NewStub(grpc::CreateChannel(prefill->grpc_address(), grpc::InsecureChannelCredentials()));
    v1::DecodeInfo info;
    v1::ConnectPeerRequest connect;
    v1::ConnectPeerResponse connected;
    {
      grpc::ClientContext context;
      SPLICE_RETURN_IF_ERROR(FromGrpcStatus(decode_stub->GetInfo(&context, {}, &info)));
    }
    *connect.mutable_endpoint() = info.endpoint();
    {
      grpc::ClientContext context;
      SPLICE_RETURN_IF_ERROR(FromGrpcStatus(prefill_stub->ConnectPeer(&context, connect, &connected)));
    }
    std::vector<TokenTimes> times;
    for (int i = 0; i <= flags.repeats; ++i) {
      SPLICE_ASSIGN_OR_RETURN(const TokenTimes run,
                              SecondToken(*decode_stub, *prefill_stub, *decode_model, prompt_of(i)));
      if (i > 0) times.push_back(run);
    }
    const TokenTimes median = Medians(times);
    fmt::print("worker: tp {} to tp {} over {}: first token {:.1f} ms ({:+.2f} %), second {:.1f} ms ({:+.2f} %)\n",
               flags.from_tp, flags.to_tp, connected.transport(), median.first * 1e3,
               100 * (median.first / plain.first - 1), median.second * 1e3, 100 * (median.second / plain.second - 1));
    std::fflush(stdout);
    out["worker"].push_back({{"carrier", connected.transport()},
                             {"first_seconds", median.first},
                             {"second_seconds", median.second},
                             {"plain_first_seconds", plain.first},
                             {"plain_second_seconds", plain.second}});
    prefill->Stop();
    decode->Stop();
  }
  return absl::OkStatus();
}

absl::Status RunBench(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const engine::RandomModel random, engine::ParseRandomModel(flags.shape));
  nlohmann::json out = {{"shape", random.config.name}, {"tokens", flags.tokens}};
  absl::Status status;
  for (const std::string& part : flags.parts) {
    absl::Status done = part == "device" ? DevicePart(random.config, flags, out)
                        : part == "host" ? HostPart(random.config, flags, out)
                                         : WorkerPart(random, flags, out);
    if (!done.ok()) fmt::print("{}: {}\n", part, MessageOf(done));
    if (status.ok()) status = done;
  }
  fmt::print("{}\n", out.dump());
  return status;
}

}  // namespace
}  // namespace spl

int main(int argc, char** argv) {
  spl::Flags flags;
  CLI::App app("Times the transfer of a long prompt's KV between two GPUs.");
  app.add_option("--random-weights", flags.shape, "SHAPE or config.json, with :SEED")->capture_default_str();
  app.add_option("--from", flags.from, "device of the prefill side")->capture_default_str();
  app.add_option("--to", flags.to, "device of the decode side")->capture_default_str();
  app.add_option("--kv-dtype", flags.kv_dtype, "K and V in auto, f32, bf16 or fp8")->capture_default_str();
  app.add_option("--from-tp", flags.from_tp, "ranks of the prefill worker")->capture_default_str();
  app.add_option("--to-tp", flags.to_tp, "ranks of the decode worker")->capture_default_str();
  app.add_option("--tokens", flags.tokens)->capture_default_str();
  app.add_option("--slices", flags.slices, "tokens that are pushed at once")->delimiter(',')->capture_default_str();
  app.add_option("--slice-tokens", flags.slice, "of the workers' prompts")->capture_default_str();
  app.add_option("--repeats", flags.repeats)->capture_default_str();
  app.add_option("--parts", flags.parts, "device, host, worker")->delimiter(',')->capture_default_str();
  app.add_option("--ways", flags.ways, "of the worker part: device, shm, tcp")->delimiter(',')->capture_default_str();
  app.add_option("--staging-bytes", flags.staging_bytes)->capture_default_str();
  app.add_flag("--tcp", flags.tcp, "the host part over TCP too");
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = spl::RunBench(flags);
  if (status.ok()) return 0;
  fmt::print(stderr, "splice_kv_transfer_bench: {}\n", spl::MessageOf(status));
  return 1;
}
