#include "tests/cluster/chaos.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <optional>
#include <sstream>
#include <utility>

#include "kernels/backend/backend.h"
#include "services/engine/engine.h"
#include "services/tokenizer/decoder.h"
#include "services/tokenizer/prompt.h"
#include "services/tokenizer/tokenizer.h"
#include "tests/support/eventually.h"
#include "tests/support/f32_model.h"
#include "tests/support/http_test_client.h"
#include "tests/support/paths.h"

namespace spl::test {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;
using Clock = std::chrono::steady_clock;
using spl::testing::HttpTestClient;

constexpr size_t kPrompts = 24;
constexpr size_t kSamples = 12;
constexpr std::chrono::milliseconds kGrace{2'000};  // behind the deadline

// Several begin alike, so that prefixes are reused; lengths differ.
std::vector<std::string> MakePrompts() {
  std::vector<std::string> prompts;
  for (size_t i = 0; i < kPrompts; ++i) {
    std::string& prompt = prompts.emplace_back("<|begin_of_text|><|im_start|>user\n");
    const size_t family = i % 4, length = 2 + 3 * (i / 4);
    for (size_t j = 0; j < length; ++j)
      prompt += "Ship " + std::to_string(family * 1000 + j * 7) + " left port " + std::to_string(j % 5) + ". ";
    prompt += "Which port did ship " + std::to_string(i) + " leave?<|im_end|>\n<|im_start|>assistant\n";
  }
  return prompts;
}

// One thing that clients ask for.
struct Query {
  std::string kind;
  json body;                       // but for `stream`
  std::vector<std::string> texts;  // of each continuation; none: not compared
};

std::string Document(int number) {
  std::string text = "Document " + std::to_string(number) + ".";
  for (int i = 0; i < 10; ++i)
    text += " Ship " + std::to_string(100 * number + i) + " carries tea and left on day " +
            std::to_string(7 * number + i) + ".";
  return text;
}

// One program that is killed, stopped and started again.
struct Node {
  enum class Kind { kPrefill, kDecode, kStore, kRouter };
  Kind kind = Kind::kPrefill;
  std::vector<std::string> argv;  // without faults
  std::unique_ptr<Process> process;
  std::string address;  // of what clients of it use; the same after a restart for stores only
  std::string fault;    // that this life has
  bool up = false;      // neither killed nor stopped; a router: ready, too
  bool down = false;    // killed
};

std::vector<std::string> FlagsOf(const PeerTlsOptions& files) {
  return {"--tls-cert", files.cert_file, "--tls-key", files.key_file, "--tls-ca", files.ca_file};
}

class Chaos {
 public:
  explicit Chaos(const ChaosOptions& options) : options_(options), random_(options.seed), prompts_(MakePrompts()) {
    report_.seed = options.seed;
  }

  ChaosReport Run() {
    if (!MakeReferences() || !StartAll() || !AskForReferences()) return report_;
    const auto start = Clock::now();
    std::vector<std::thread> clients;
    for (int i = 0; i < options_.num_clients; ++i)
      clients.emplace_back([this, seed = options_.seed * 1000 + static_cast<uint64_t>(i)] { Client(seed); });
    auto next_line = start + 10s;
    while (true) {
      const auto now = Clock::now();
      const bool enough = now - start >= options_.duration && NumRequests() >= options_.min_requests;
      // Whatever the number, not for ever.
      if (enough || now - start >= 3 * options_.duration || ::testing::Test::HasFailure()) break;
      if (now >= next_line) {
        next_line += 10s;
        PrintLine(now - start);
      }
      Sleep(std::chrono::milliseconds(Draw(options_.between_faults.count()) + options_.between_faults.count() / 2));
      if (!OneFault()) break;
    }
    Heal();
    stop_ = true;
    for (std::thread& client : clients) client.join();
    report_.seconds = std::chrono::duration<double>(Clock::now() - start).count();
    After();
    CollectSilence();
    return report_;
  }

 private:
  // ---- set-up

  bool MakeReferences() {
    EXPECT_TRUE(CopyModelAsF32(kTinyModel, model_dir_));
    const auto model = engine::Model::Load(model_dir_, kernels::MakeCpuBackend(), {});
    const auto tokenizer = tokenizer::Tokenizer::Load(model_dir_);
    EXPECT_TRUE(model.ok() && tokenizer.ok());
    if (!model.ok() || !tokenizer.ok()) return false;
    auto generator = engine::LocalGenerator::Create(*model, {.max_tokens = 4096});
    EXPECT_TRUE(generator.ok()) << generator.status();
    if (!generator.ok()) return false;
    const auto text_of = [&](const std::string& prompt, const engine::SamplingParams& sampling) {
      const auto ids = tokenizer::EncodePrompt(**tokenizer, prompt, true);
      tokenizer::StreamDecoder decoder(**tokenizer, {.skip_special_tokens = true});
      std::string text;
      const auto on_token = [&](int32_t, const engine::SampledToken& token) {
        text += *decoder.Append(token.token);
        return true;
      };
      const absl::Status status = (*generator)->Generate(*ids, sampling, on_token);
      EXPECT_TRUE(status.ok()) << status;
      return text + decoder.Finish();
    };
    std::set<std::string> texts;
    for (size_t i = 0; i < prompts_.size(); ++i) {
      engine::SamplingParams sampling;
      sampling.temperature = 0;
      sampling.max_tokens = options_.max_tokens;
      sampling.ignore_eos = true;
      Query plain{"plain", BodyOf(prompts_[i]), {text_of(prompts_[i], sampling)}};
      texts.insert(plain.texts[0]);
      // Every prompt is asked for in one more way, and those are a half of the requests.
      Query other = plain;
      if (i % 4 == 0) {
        other.kind = "256 tokens";
        other.body["max_tokens"] = sampling.max_tokens = 256;
        other.texts = {text_of(prompts_[i], sampling)};
      } else if (i % 4 == 1) {
        other.kind = "penalties";
        other.body["repetition_penalty"] = sampling.repetition_penalty = 1.5F;
        other.body["presence_penalty"] = sampling.presence_penalty = 0.5F;
        other.texts = {text_of(prompts_[i], sampling)};
      } else if (i % 4 == 2) {
        other.kind = "n = 2";
        other.body["n"] = 2;
        other.texts = {plain.texts[0], plain.texts[0]};
      } else {
        other.kind = "session";
        other.body["splice"] = {{"session", "chaos-" + std::to_string(i % 3)}};
      }
      queries_.push_back(std::move(plain));
      others_.push_back(std::move(other));
    }
    // The check is worth nothing unless prompts differ in their answers.
    EXPECT_GT(texts.size(), kPrompts / 2);
    return !::testing::Test::HasFailure();
  }

  json BodyOf(const json& prompt) const {
    return {{"model", "splice-tiny"},
            {"prompt", prompt},
            {"max_tokens", options_.max_tokens},
            {"temperature", 0},
            {"ignore_eos", true}};
  }

  // Segments and documents of a knowledge base, of which the cluster itself says, while it is well, what their prompts
  // give exactly; and by a method that approximates.
  bool AskForReferences() {
    const std::string& router = nodes_.back()->address;
    json documents = json::array();
    for (int i = 0; i < 3; ++i) documents.push_back({{"id", std::to_string(i)}, {"text", Document(i)}});
    const HttpReply published =
        HttpPost(router, "/admin/v1/knowledge_bases",
                 json({{"name", "ships"}, {"instruction", "Read."}, {"documents", documents}, {"swap", true}}).dump());
    EXPECT_EQ(published.status, 200) << published.body;
    for (int i = 0; i < 3; ++i) {
      for (const bool base : {false, true}) {
        const json reused =
            base ? json({{"type", "segment"}, {"knowledge_base", "ships"}, {"document", std::to_string(i)}})
                 : json({{"type", "segment"}, {"text", Document(10 + i)}});
        const json parts = {{{"type", "text"}, {"text", "Read this.\n"}},
                            reused,
                            {{"type", "text"}, {"text", "\nWhat does ship " + std::to_string(105 + i) + " carry?"}}};
        Query exact{base ? "knowledge base" : "segments", BodyOf(parts), {}};
        Query approximate = exact;
        exact.body["splice"] = {{"reuse", "exact"}};
        approximate.body["splice"] = {{"reuse", "sparsex"}};
        const Answer answer = Exchange(router, exact.body.dump(), false, "chaos-reference");
        EXPECT_EQ(answer.status, 200) << answer.error;
        exact.texts = answer.texts;
        others_.push_back(std::move(exact));
        others_.push_back(std::move(approximate));
      }
    }
    return !::testing::Test::HasFailure();
  }

  bool StartAll() {
    etcd_ = spl::testing::EtcdProcess::Start(dir_.path() + "/etcd");
    if (etcd_ == nullptr) return false;
    const std::string discovery = "etcd://" + etcd_->endpoint() + "/chaos";
    const auto add = [&](Node::Kind kind, std::vector<std::string> argv) {
      auto node = std::make_unique<Node>();
      node->kind = kind;
      if (options_.tls) {
        const auto tls = FlagsOf(ca_.IssueFiles(dir_.path(), "node" + std::to_string(nodes_.size())));
        argv.insert(argv.begin() + 1, tls.begin(), tls.end());
      }
      node->argv = std::move(argv);
      nodes_.push_back(std::move(node));
      return Launch(*nodes_.back(), "");
    };
    std::string stores;
    for (int i = 0; i < options_.num_stores; ++i) {
      if (!add(
              Node::Kind::kStore,
              {BinDir() + "/splice-kvstore", "--data-dir", dir_.path() + "/store" + std::to_string(i), "--memory-bytes",
               "64MiB", "--disk-bytes", "256MiB", "--metrics-listen", "127.0.0.1:0", "--listen", "127.0.0.1:0"}))
        return false;
      Node& node = *nodes_.back();
      // Stores are known by their addresses: they come back where they were.
      node.argv.back() = node.address;
      stores += (stores.empty() ? "" : ",") + node.address;
    }
    for (int i = 0; i < options_.num_decode + options_.num_prefill; ++i) {
      const bool decode = i < options_.num_decode;
      std::vector<std::string> argv = {BinDir() + (decode ? "/splice-decode" : "/splice-prefill"),
                                       "--model",
                                       model_dir_,
                                       "--discovery",
                                       discovery,
                                       "--lease-seconds",
                                       "3",
                                       "--threads",
                                       "1",
                                       "--kv-bytes",
                                       "160MiB",
                                       "--worker-id",
                                       (decode ? "d" : "p") + std::to_string(decode ? i : i - options_.num_decode)};
      if (!decode) argv.insert(argv.end(), {"--store", stores});
      if (!add(decode ? Node::Kind::kDecode : Node::Kind::kPrefill, argv)) return false;
    }
    for (int i = 0; i < options_.num_routers; ++i) {
      if (!add(Node::Kind::kRouter, {BinDir() + "/splice-router", "--model", model_dir_, "--http", "127.0.0.1:0",
                                     "--grpc", "127.0.0.1:0", "--discovery", discovery, "--store", stores,
                                     "--ticket-ttl-ms", std::to_string(options_.ticket_ttl.count())}))
        return false;
    }
    return WaitReady();
  }

  bool Launch(Node& node, const std::string& fault) {
    std::vector<std::string> argv = node.argv;
    if (!fault.empty()) argv.insert(argv.end(), {"--fault", fault});
    auto process = Process::StartAndWaitReady(argv);
    if (process == nullptr) return false;
    std::lock_guard lock(mutex_);
    node.down = false;
    node.address = process->ready(node.kind == Node::Kind::kRouter ? "http" : "grpc");
    node.process = std::move(process);
    node.fault = fault;
    node.up = node.kind != Node::Kind::kRouter;  // a load balancer asks a router first, see NoteReady
    return true;
  }

  bool WaitReady() {
    for (const auto& node : nodes_) {
      if (node->kind != Node::Kind::kRouter) continue;
      const bool ready = Eventually(
          [&] {
            const std::string metrics = HttpGet(node->address, "/metrics").body;
            return MetricValue(metrics, "splice_router_workers") == options_.num_prefill + options_.num_decode &&
                   HttpGet(node->address, "/readyz").status == 200;
          },
          60s);
      EXPECT_TRUE(ready) << "a router does not see all workers";
      if (!ready) return false;
    }
    NoteReady();
    return true;
  }

  // Clients are sent to routers that are ready, as by any load balancer: one that starts while etcd is away has no list
  // yet.
  void NoteReady() {
    for (const auto& node : nodes_) {
      if (node->kind != Node::Kind::kRouter || node->up || node->process == nullptr || node->down) continue;
      if (HttpGet(node->address, "/readyz").status != 200) continue;
      std::lock_guard lock(mutex_);
      node->up = true;
    }
  }

  // ---- faults

  uint64_t Draw(uint64_t below) { return below == 0 ? 0 : random_() % below; }

  void Sleep(std::chrono::milliseconds time) {
    const auto until = Clock::now() + time;
    std::unique_lock lock(wake_mutex_);
    wake_.wait_until(lock, until, [] { return false; });
    Recover();
    NoteReady();
  }

  // What comes back, and when.
  struct Recovery {
    Clock::time_point at;
    Node* node = nullptr;  // null: etcd
    bool killed = false;
    std::string fault;
  };

  void Recover() {
    const auto now = Clock::now();
    for (size_t i = 0; i < recoveries_.size();) {
      if (recoveries_[i].at > now) {
        ++i;
        continue;
      }
      const Recovery recovery = recoveries_[i];
      recoveries_.erase(recoveries_.begin() + static_cast<ptrdiff_t>(i));
      if (recovery.node == nullptr) {
        EXPECT_TRUE(etcd_->Restart()) << "etcd does not come back";
      } else if (recovery.killed) {
        EXPECT_TRUE(Launch(*recovery.node, recovery.fault));
      } else {
        recovery.node->process->Signal(SIGCONT);
        std::lock_guard lock(mutex_);
        recovery.node->up = true;
      }
    }
  }

  // A node of that kind that is well, if at least two are: a pool is never taken away as a whole.
  Node* Victim(Node::Kind kind) {
    std::vector<Node*> up;
    for (const auto& node : nodes_) {
      if (node->kind == kind && node->up) up.push_back(node.get());
    }
    return up.size() < 2 ? nullptr : up[Draw(up.size())];
  }

  // What a worker or store that starts again does wrong.
  std::string DrawFault(Node::Kind kind) {
    const std::string at = "@" + std::to_string(1 + Draw(60));
    if (kind == Node::Kind::kStore) {
      const std::vector<std::string> faults = {"", "kvstore.slab.write=error(RESOURCE_EXHAUSTED)",
                                               "kvstore.rma.commit=drop" + at, "kvstore.rma.lease=corrupt" + at};
      return faults[Draw(faults.size())];
    }
    if (kind == Node::Kind::kDecode) {
      const std::vector<std::string> faults = {"", "", "decode.land=corrupt" + at, "decode.land=delay(1500)" + at};
      return faults[Draw(faults.size())];
    }
    const std::vector<std::string> faults = {"",
                                             "",
                                             "transport.put=drop" + at,
                                             "transport.put=delay(800)" + at,
                                             "transport.put=delay(" + ThreeTtl() + ")" + at,
                                             "transport.piece=delay(" + ThreeTtl() + ")" + at,
                                             "transport.put=error(UNAVAILABLE)" + at,
                                             "prefill.commit=drop" + at,
                                             "prefill.commit=corrupt" + at,
                                             "prefill.run=error(INTERNAL)" + at,
                                             "prefill.run=kill" + at,
                                             "transport.get=error(UNAVAILABLE)" + at};
    return faults[Draw(faults.size())];
  }

  std::string ThreeTtl() const { return std::to_string(3 * options_.ticket_ttl.count()); }

  static bool Ended(const Node& node) { return node.process != nullptr && node.process->WaitForExit(0s) != -1; }
  // Only what has a fault point that ends it may end.
  static bool MayEnd(const Node& node) { return node.fault.find("=kill") != std::string::npos; }

  void NoteEnded(Node& node) {
    const bool meant = MayEnd(node);
    Count(meant ? "ended by its fault point" : "ended by itself");
    {
      std::lock_guard lock(mutex_);
      node.up = false;
      node.down = true;
      router_kills_ += node.kind == Node::Kind::kRouter;
      if (!meant) {
        ++report_.crashes;
        const std::string stderr_text = node.process->Stderr();
        Sample(std::string(KindName(node.kind)) +
               " ended: " + stderr_text.substr(stderr_text.size() > 3000 ? stderr_text.size() - 3000 : 0));
      }
    }
    KeepSilence(node);
  }

  bool OneFault() {
    // What ended by itself is started again first.
    for (const auto& node : nodes_) {
      if (!node->up || !Ended(*node)) continue;
      NoteEnded(*node);
      recoveries_.push_back({Clock::now(), node.get(), true, ""});
    }
    static constexpr Node::Kind kKinds[] = {Node::Kind::kPrefill, Node::Kind::kPrefill, Node::Kind::kPrefill,
                                            Node::Kind::kDecode,  Node::Kind::kDecode,  Node::Kind::kDecode,
                                            Node::Kind::kStore,   Node::Kind::kStore};
    const uint64_t choice = options_.only_routers ? 1 : Draw(20);
    if (choice == 0) {
      const bool down = std::any_of(recoveries_.begin(), recoveries_.end(), [](const auto& r) { return !r.node; });
      if (!down) {
        Count("etcd killed");
        etcd_->Kill();
        recoveries_.push_back({Clock::now() + std::chrono::milliseconds(500 + Draw(5'000))});
      }
    } else if (choice == 1) {
      if (Node* const node = Victim(Node::Kind::kRouter)) Kill(*node, "");
    } else {
      const Node::Kind kind = kKinds[Draw(std::size(kKinds))];
      Node* const node = Victim(kind);
      const bool stop = Draw(2) == 0;
      const std::string fault = DrawFault(kind);
      if (node == nullptr) return !::testing::Test::HasFailure();
      stop ? Stop(*node) : Kill(*node, fault);
    }
    return !::testing::Test::HasFailure();
  }

  void Kill(Node& node, const std::string& fault) {
    Count(std::string(KindName(node.kind)) + " killed");
    if (!fault.empty()) Count("with " + fault.substr(0, fault.find('@')));
    {
      std::lock_guard lock(mutex_);
      node.up = false;
      node.down = true;
      if (node.kind == Node::Kind::kRouter) ++router_kills_;
    }
    node.process->Signal(SIGKILL);
    node.process->WaitForExit();
    KeepSilence(node);
    recoveries_.push_back({Clock::now() + std::chrono::milliseconds(200 + Draw(2'500)), &node, true, fault});
  }

  void Stop(Node& node) {
    Count(std::string(KindName(node.kind)) + " stopped");
    {
      std::lock_guard lock(mutex_);
      node.up = false;
    }
    node.process->Signal(SIGSTOP);
    const uint64_t longest = Draw(4) == 0 ? static_cast<uint64_t>(3 * options_.ticket_ttl.count()) : 4'500;
    recoveries_.push_back({Clock::now() + std::chrono::milliseconds(300 + Draw(longest)), &node, false, ""});
  }

  static const char* KindName(Node::Kind kind) {
    static constexpr const char* kNames[] = {"prefill", "decode", "store", "router"};
    return kNames[static_cast<int>(kind)];
  }

  // Everything comes back and stays: a fault point that was not reached yet would be while the end is judged. Not each
  // is made good (a request with n > 1 whose KV lands damaged has sent its first tokens and ends), and nobody starts a
  // program again then.
  void Heal() {
    while (!recoveries_.empty()) {
      for (Recovery& recovery : recoveries_) {
        recovery.at = Clock::now();
        recovery.fault.clear();
      }
      Recover();
    }
    for (const auto& node : nodes_) {
      if (Ended(*node)) {
        NoteEnded(*node);
      } else if (!node->fault.empty()) {
        node->process->Signal(SIGKILL);
        node->process->WaitForExit();
        KeepSilence(*node);
      } else {
        continue;
      }
      EXPECT_TRUE(Launch(*node, ""));
    }
  }

  // ---- clients

  void Client(uint64_t seed) {
    std::mt19937_64 random(seed);
    while (!stop_) {
      const auto& queries = random() % 2 == 0 ? queries_ : others_;
      const Query& query = queries[random() % queries.size()];
      const bool stream = random() % 2 == 0;
      // A client asks another router when its own is gone, as behind a load balancer.
      for (int attempt = 0; attempt < 3; ++attempt) {
        if (!Ask(query, stream, random())) break;
      }
    }
  }

  struct Answer {
    int status = 0;
    std::vector<std::string> texts;  // of each continuation
    std::string error;               // JSON of it
    json receipt;
    bool whole = false;  // it ended as answers end
    std::string why;     // if not: what the socket said
    int local_port = 0;
  };

  // What the routers have logged of a request. Whoever closed its connection: one that saw its client leave did not.
  std::string RouterLines(const std::string& request_id) {
    std::string found;
    for (const auto& node : nodes_) {
      if (node->kind != Node::Kind::kRouter || node->process == nullptr) continue;
      std::istringstream lines(node->process->Stderr());
      for (std::string line; std::getline(lines, line);) {
        if (line.find(request_id) != std::string::npos) found += "[" + node->address + "] " + line + " ";
      }
    }
    return found.empty() ? "nothing" : found;
  }

  // True: the router was lost, ask another one.
  bool Ask(const Query& query, bool stream, uint64_t draw) {
    std::string address;
    uint64_t kills = 0;
    {
      std::lock_guard lock(mutex_);
      std::vector<std::string> routers;
      for (const auto& node : nodes_) {
        if (node->kind == Node::Kind::kRouter && node->up) routers.push_back(node->address);
      }
      if (!routers.empty()) address = routers[draw % routers.size()];
      kills = router_kills_;
    }
    json body = query.body;
    body["stream"] = stream;
    const auto start = Clock::now();
    const std::string request_id = "chaos-" + std::to_string(draw);
    const Answer answer = Exchange(address, body.dump(), stream, request_id);
    const auto took = Clock::now() - start;
    std::lock_guard lock(mutex_);
    if (!answer.whole && router_kills_ != kills) {
      ++report_.router_lost;
      return true;
    }
    ++report_.requests;
    const std::string took_text = std::to_string(std::chrono::duration<double>(took).count()) + " s";
    if (took > options_.deadline + kGrace) {
      ++report_.hangs;
      Sample("took " + took_text + ": " + answer.error);
    } else if (!answer.whole) {
      ++report_.untyped;
      Sample("broke off after " + took_text + " with status " + std::to_string(answer.status) + ", " +
             json(answer.texts).dump() + "; from port " + std::to_string(answer.local_port) + " to " + address + ", " +
             answer.why + "; routers say: " + RouterLines(request_id));
    } else if (!answer.error.empty()) {
      CountRefusal(answer);
    } else if (query.texts.empty()) {
      ++report_.ended;
      ++report_.kinds[query.kind + ", approximated"];
    } else if (answer.texts != query.texts) {
      ++report_.wrong;
      Sample(query.kind + " " + query.body.dump() + " gave " + json(answer.texts).dump() + ", not " +
             json(query.texts).dump() + ", " + answer.receipt.dump());
    } else {
      ++report_.exact;
      ++report_.kinds[query.kind];
    }
    if (answer.receipt.is_object()) {
      report_.migrated += answer.receipt.value("migrations", 0) > 0;
      report_.retried += answer.receipt.value("attempts", 1) > 1 + answer.receipt.value("migrations", 0);
    }
    return false;
  }

  Answer Exchange(const std::string& address, const std::string& body, bool stream, const std::string& request_id) {
    HttpTestClient client(address);
    Answer answer = Exchange(client, body, stream, request_id);
    answer.why = client.why();
    answer.local_port = client.local_port();
    return answer;
  }

  Answer Exchange(HttpTestClient& client, const std::string& body, bool stream, const std::string& request_id) {
    const std::vector<std::string> headers = {"content-type: application/json", "x-request-id: " + request_id,
                                              "x-request-timeout-ms: " + std::to_string(options_.deadline.count())};
    Answer answer;
    if (!client.connected()) return answer;
    client.SendRequest("POST", "/v1/completions", body, headers);
    if (!stream) {
      const auto response = client.Read();
      answer.status = response.status;
      const json reply = json::parse(response.body, nullptr, false);
      answer.whole = response.status != 0 && reply.is_object();
      if (!answer.whole) return answer;
      if (response.status != 200) {
        answer.error = response.body;
        return answer;
      }
      for (const json& choice : reply["choices"]) answer.texts.push_back(choice["text"]);
      answer.receipt = reply["splice"];
      return answer;
    }
    auto head = client.ReadHead();
    answer.status = head.status;
    if (head.status == 0) return answer;
    if (head.status != 200) {
      const auto response = client.ReadBody(head);
      answer.error = response.body;
      answer.whole = response.status != 0;
      return answer;
    }
    while (auto event = client.NextEvent()) {
      if (*event == "[DONE]") {
        answer.whole = true;
        break;
      }
      const json data = json::parse(*event, nullptr, false);
      if (!data.is_object()) return answer;
      if (data.contains("error")) {
        answer.error = *event;
        answer.whole = true;
        return answer;
      }
      for (const json& choice : data.value("choices", json::array())) {
        const auto index = choice.value("index", size_t{0});
        if (index >= answer.texts.size()) answer.texts.resize(index + 1);
        answer.texts[index] += choice.value("text", "");
      }
      if (data.contains("splice")) answer.receipt = data["splice"];
    }
    return answer;
  }

  void CountRefusal(const Answer& answer) {
    const json reply = json::parse(answer.error, nullptr, false);
    const json error = reply.is_object() ? reply.value("error", json::object()) : json::object();
    if (!error.is_object() || !error.contains("type")) {
      ++report_.untyped;
      Sample("no type in " + answer.error);
      return;
    }
    std::string name = std::to_string(answer.status) + " " + error["type"].get<std::string>();
    if (error.contains("code") && error["code"].is_string()) name += " " + error["code"].get<std::string>();
    if (++report_.refused[name] <= 3) Sample(name + ": " + error.value("message", ""));
  }

  void Sample(const std::string& text) {
    if (report_.samples.size() < kSamples) report_.samples.push_back(text);
    std::printf("chaos: %s\n", text.c_str());
  }

  // ---- the end

  void After() {
    if (!WaitReady()) return;
    std::vector<Query> all = queries_;
    all.insert(all.end(), others_.begin(), others_.end());
    for (size_t i = 0; i < all.size(); ++i) {
      for (const auto& node : nodes_) {
        if (node->kind != Node::Kind::kRouter) continue;
        const Answer answer = Exchange(node->address, all[i].body.dump(), false, "chaos-after-" + std::to_string(i));
        ++report_.requests_after;
        report_.exact_after += answer.status == 200 && (all[i].texts.empty() || answer.texts == all[i].texts);
        if (answer.status != 200) Sample("afterwards: " + std::to_string(answer.status) + " " + answer.error);
      }
    }
    // A ticket whose writer does not answer stays out of use until it cannot be written any more.
    Eventually(
        [&] {
          report_.leaked_pages = Sum(Node::Kind::kDecode, "splice_kv_pages_used");
          report_.unfinished = Sum(Node::Kind::kDecode, "splice_num_requests_running") +
                               Sum(Node::Kind::kDecode, "splice_kv_tickets_quarantined") +
                               Sum(Node::Kind::kPrefill, "splice_num_requests_waiting") +
                               Sum(Node::Kind::kRouter, "splice_num_requests_running");
          return report_.leaked_pages == 0 && report_.unfinished == 0;
        },
        150s);
    if (report_.leaked_pages == 0 && report_.unfinished == 0) return;
    for (const auto& node : nodes_) {
      if (Ended(*node)) Sample(std::string(KindName(node->kind)) + " has ended before the end was judged");
    }
  }

  double Sum(Node::Kind kind, const std::string& metric) {
    double sum = 0;
    for (const auto& node : nodes_) {
      if (node->kind != kind) continue;
      const std::string address = kind == Node::Kind::kRouter ? node->address : node->process->ready("metrics");
      sum += MetricValue(HttpGet(address, "/metrics").body, metric);
    }
    return sum;
  }

  // A router says of each lost worker for how long it had been silent.
  void KeepSilence(const Node& node) {
    if (node.kind != Node::Kind::kRouter || node.process == nullptr) return;
    std::istringstream lines(node.process->Stderr());
    for (std::string line; std::getline(lines, line);) {
      const size_t at = line.find("silence_s=");
      if (line.find("router.worker_lost") == std::string::npos || at == std::string::npos) continue;
      report_.silence_s.push_back(std::stod(line.substr(at + std::string("silence_s=").size())));
    }
  }
  void CollectSilence() {
    for (const auto& node : nodes_) KeepSilence(*node);
    std::sort(report_.silence_s.begin(), report_.silence_s.end());
  }

  void Count(const std::string& fault) {
    std::lock_guard lock(mutex_);
    ++report_.faults[fault];
  }
  uint64_t NumRequests() {
    std::lock_guard lock(mutex_);
    return report_.requests;
  }
  void PrintLine(Clock::duration elapsed) {
    std::lock_guard lock(mutex_);
    uint64_t refused = 0, faults = 0;
    for (const auto& [name, count] : report_.refused) refused += count;
    for (const auto& [name, count] : report_.faults) faults += count;
    std::printf("%4.0f s: %llu requests, %llu exact, %llu wrong, %llu refused, %llu hung, %llu untyped, %llu faults\n",
                std::chrono::duration<double>(elapsed).count(), static_cast<unsigned long long>(report_.requests),
                static_cast<unsigned long long>(report_.exact), static_cast<unsigned long long>(report_.wrong),
                static_cast<unsigned long long>(refused), static_cast<unsigned long long>(report_.hangs),
                static_cast<unsigned long long>(report_.untyped), static_cast<unsigned long long>(faults));
    std::fflush(stdout);
  }

  const ChaosOptions options_;
  std::mt19937_64 random_;
  const std::vector<std::string> prompts_;
  std::vector<Query> queries_, others_;  // before the clients start
  spl::testing::TempDir dir_;
  const std::string model_dir_ = dir_.path() + "/splice-tiny";
  const TestCa ca_{"CA"};
  std::unique_ptr<spl::testing::EtcdProcess> etcd_;
  std::vector<Recovery> recoveries_;
  std::mutex wake_mutex_;
  std::condition_variable wake_;
  std::atomic<bool> stop_{false};
  std::mutex mutex_;  // guards the report, the nodes' addresses and whether they are up
  std::vector<std::unique_ptr<Node>> nodes_;
  uint64_t router_kills_ = 0;
  ChaosReport report_;
};

}  // namespace

double ChaosReport::SilenceQuantile(double q) const {
  if (silence_s.empty()) return 0;
  return silence_s[std::min(silence_s.size() - 1, static_cast<size_t>(q * static_cast<double>(silence_s.size())))];
}

nlohmann::ordered_json ChaosReport::ToJson() const {
  nlohmann::ordered_json out;
  out["seed"] = seed;
  out["seconds"] = seconds;
  out["requests"] = requests;
  out["exact"] = exact;
  out["wrong"] = wrong;
  out["ended"] = ended;
  out["kinds"] = kinds;
  out["hangs"] = hangs;
  out["untyped"] = untyped;
  out["crashes"] = crashes;
  out["refused"] = refused;
  out["router_lost"] = router_lost;
  out["migrated"] = migrated;
  out["retried"] = retried;
  out["faults"] = faults;
  out["lost_workers"] = silence_s.size();
  out["silence_p50_s"] = SilenceQuantile(0.5);
  out["silence_p99_s"] = SilenceQuantile(0.99);
  out["silence_max_s"] = silence_s.empty() ? 0 : silence_s.back();
  std::map<std::string, int> histogram;
  for (const double s : silence_s) ++histogram[std::to_string(static_cast<int>(s * 10)) + "00 ms"];
  out["silence_histogram"] = histogram;
  out["leaked_pages"] = leaked_pages;
  out["unfinished"] = unfinished;
  out["requests_after"] = requests_after;
  out["exact_after"] = exact_after;
  out["samples"] = samples;
  return out;
}

ChaosReport RunChaos(const ChaosOptions& options) { return Chaos(options).Run(); }

}  // namespace spl::test
