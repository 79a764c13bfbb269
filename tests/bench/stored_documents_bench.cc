// Time to the first token of a prompt whose documents are on the disk of a chunk store and nowhere else, by method:
// sparsex fetches all of their KV, samkv their quantized copies, samkv-means (choose=means) their summaries and what it
// reads. samkv-whole: without quantized copies; samkv-attention: choose=attention.
//
//   splice_stored_documents_bench --model models/splice-tiny --data-dir DIR [--documents 16] [--document-tokens 1000]
//     [--methods sparsex,samkv,samkv-means=0.15] [--rounds 5] [--backend cpu|cuda]
//
// Documents are published once, each by itself, and acknowledged on disk. Then methods take turns. Before each prompt
// the store starts anew with an empty memory, the kernel is asked to forget its files, and the prefill engine
// starts anew, too. The time is from Submit to the first token, the fetch included.
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <future>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "services/base/check.h"
#include "services/chunk/remote/cluster_chunk_store.h"
#include "services/engine/engine.h"
#include "services/kvstore/kvstore_server.h"
#include "services/worker_flags/worker_flags.h"
#include "tests/bench/median.h"

namespace {

using namespace spl;
using Clock = std::chrono::steady_clock;

constexpr chunk::Digest kNamespace{9};

struct Setup {
  std::string model_dir, data_dir, backend = "cpu";
  std::string carrier = "shm";
  int documents = 16;
  int document_tokens = 1000;
  int question_tokens = 24;
  std::vector<std::string> methods = {"sparsex", "samkv", "samkv-attention", "samkv-means"};
  int rounds = 5;
};

struct Measured {
  std::vector<double> first_token, fetch, prefill;
  engine::PrefillStats stats;
};

class Bench {
 public:
  explicit Bench(const Setup& setup)
      : setup_(setup),
        model_(std::move(engine::Model::Load(setup.model_dir, std::move(MakeBackend(setup.backend)).value())).value()) {
    std::mt19937 random(7);
    const auto text = [&](int length) {
      std::vector<int32_t> tokens(static_cast<size_t>(length));
      for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 4000);
      return tokens;
    };
    prompt_ = text(30);
    for (int i = 0; i < setup.documents; ++i) {
      documents_.push_back(text(setup.document_tokens));
      const auto begin = static_cast<int32_t>(prompt_.size());
      segments_.push_back({{begin, begin + setup.document_tokens}, kNamespace});
      prompt_.insert(prompt_.end(), documents_.back().begin(), documents_.back().end());
    }
    const auto question = text(setup.question_tokens);
    prompt_.insert(prompt_.end(), question.begin(), question.end());
  }

  void Run() {
    Publish();
    std::map<std::string, Measured> all;
    for (int round = 0; round < setup_.rounds; ++round) {
      for (const std::string& method : setup_.methods) Measure(method, all[method]);
    }
    std::printf("%s, %d documents of %d tokens on disk, prompt of %zu tokens, %d rounds in turns; medians\n",
                model_->config().name.c_str(), setup_.documents, setup_.document_tokens, prompt_.size(), setup_.rounds);
    for (auto& [method, m] : all)
      std::printf(
          "  %-20s first token %7.3f s (%.3f to %.3f), fetch %6.3f s, prefill %6.3f s, fetched %7.2f MiB, kept %.3f, "
          "recomputed %lld, summaries computed %lld\n",
          method.c_str(), Median(m.first_token), *std::min_element(m.first_token.begin(), m.first_token.end()),
          *std::max_element(m.first_token.begin(), m.first_token.end()), Median(m.fetch), Median(m.prefill),
          static_cast<double>(m.stats.fetched_bytes) / (1 << 20), m.stats.kept_share,
          static_cast<long long>(m.stats.recomputed_tokens), static_cast<long long>(m.stats.summaries_computed));
  }

 private:
  // A store, and an engine that knows nothing.
  struct Parts {
    std::unique_ptr<transport::KvTransport> transport;
    std::unique_ptr<transport::RegisteredMemory> memory;  // the pages, on the host
    std::optional<engine::KvMemory> device_memory;        // those of a GPU
    std::unique_ptr<kvstore::KvStoreServer> server;
    std::shared_ptr<chunk::ChunkStore> store;
    std::unique_ptr<engine::PrefillEngine> engine;

    ~Parts() {
      if (engine) engine->Stop();
      engine.reset();
      store.reset();
      memory.reset();
      server.reset();
      if (transport) transport->Stop();
    }
  };

  std::unique_ptr<Parts> Start() {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(setup_.data_dir)) {
      if (!entry.is_regular_file()) continue;
      const int file = ::open(entry.path().c_str(), O_RDONLY);
      SPLICE_CHECK(file >= 0, "a file of the store");
      (void)::fdatasync(file);
      (void)::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
      ::close(file);
    }
    auto parts = std::make_unique<Parts>();
    transport::TransportOptions transport;
    transport.carriers = setup_.carrier;
    parts->transport = std::move(transport::KvTransport::Create(transport)).value();
    const int64_t pages = engine::PagesForTokens(model_->config(), 2 * static_cast<int64_t>(prompt_.size()) + 2048);
    const bool on_host = model_->backend().host_memory();
    if (on_host) {
      parts->memory =
          std::move(parts->transport->Allocate(static_cast<uint64_t>(pages) * model_->page_bytes())).value();
    } else {
      parts->device_memory = std::move(engine::AllocateKvMemory(*model_, static_cast<int32_t>(pages))).value();
    }
    kvstore::KvStoreOptions options;
    options.kv_transport = setup_.carrier;
    options.data_dir = setup_.data_dir;
    parts->server = std::move(kvstore::KvStoreServer::Start(options)).value();
    chunk::RemoteStoreOptions remote;
    remote.transport = parts->transport.get();
    parts->store = std::move(chunk::ClusterChunkStore::Connect(parts->server->grpc_address(), remote, {})).value();
    engine::PrefillEngineOptions prefill;
    prefill.store = parts->store;
    prefill.store_timeout = std::chrono::minutes(2);
    const engine::KvPartitions partitions =
        on_host ? engine::PartitionHostMemory(*model_, parts->memory->data(), static_cast<int32_t>(pages))
                : parts->device_memory->pages;
    parts->engine = std::move(engine::PrefillEngine::Create(model_, partitions, prefill)).value();
    return parts;
  }

  void Publish() {
    const auto parts = Start();
    for (const auto& text : documents_) {
      std::promise<absl::Status> done;
      engine::PublishRequest request;
      request.tokens = text;
      request.segments = {{{0, static_cast<int32_t>(text.size())}, kNamespace}};
      request.put = {.durable = true};
      request.on_done = [&](const absl::Status& status, const engine::PublishOutcome&) { done.set_value(status); };
      SPLICE_CHECK(parts->engine->Publish(std::move(request)).ok(), "publish");
      const absl::Status status = done.get_future().get();
      SPLICE_CHECK(status.ok(), status.ToString().c_str());
    }
  }

  void Measure(const std::string& method, Measured& measured) {
    const auto parts = Start();
    engine::PrefillRequest request;
    request.tokens = prompt_;
    request.segments = segments_;
    request.publish = false;
    request.sampling.temperature = 0;
    const size_t number = method.find('=');
    request.reuse.policy = method.substr(0, number);
    if (request.reuse.policy.starts_with("samkv-")) {
      const std::string kind = request.reuse.policy.substr(6);
      request.reuse.policy = "samkv";
      request.reuse.quantized_copies = kind != "whole";
      if (kind != "whole") request.reuse.choose = kind;
    }
    request.reuse.budget_ratio = number == std::string::npos ? 0.25 : std::stod(method.substr(number + 1));
    std::promise<absl::Status> done;
    Clock::time_point end;
    request.on_done = [&](const absl::Status& status, const engine::PrefillOutcome& outcome) {
      end = Clock::now();
      measured.stats = outcome.stats;
      done.set_value(status);
    };
    const Clock::time_point start = Clock::now();
    SPLICE_CHECK(parts->engine->Submit(std::move(request)).ok(), "submit");
    const absl::Status status = done.get_future().get();
    SPLICE_CHECK(status.ok(), status.ToString().c_str());
    SPLICE_CHECK(measured.stats.aligned_tokens == int64_t{setup_.documents} * setup_.document_tokens,
                 "every document was found");
    measured.first_token.push_back(std::chrono::duration<double>(end - start).count());
    measured.fetch.push_back(measured.stats.fetch_s);
    measured.prefill.push_back(measured.stats.prefill_s);
  }

  const Setup setup_;
  const std::shared_ptr<const engine::Model> model_;
  std::vector<int32_t> prompt_;
  std::vector<std::vector<int32_t>> documents_;
  std::vector<engine::ReuseSpan> segments_;
};

}  // namespace

int main(int argc, char** argv) {
  Setup setup;
  CLI::App app("Time to the first token with documents on the store's disk");
  app.add_option("--model", setup.model_dir)->required();
  app.add_option("--data-dir", setup.data_dir, "of the store; made, and kept")->required();
  app.add_option("--documents", setup.documents)->capture_default_str();
  app.add_option("--document-tokens", setup.document_tokens)->capture_default_str();
  app.add_option("--methods", setup.methods, "NAME[=BUDGET], separated by commas")->delimiter(',');
  app.add_option("--rounds", setup.rounds)->capture_default_str();
  app.add_option("--backend", setup.backend, "cpu or cuda")->capture_default_str();
  app.add_option("--carrier", setup.carrier, "shm or tcp")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  std::filesystem::create_directories(setup.data_dir);
  Bench(setup).Run();
  return 0;
}
