// Generates text for the tools, with one interface to a running server and to the plain in-process model.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/worker_flags/worker_flags.h"
#include "tools/cli/endpoint.h"

namespace spl::cli {

struct TextRequest {
  // Set one of text, messages and ids. Text is tokenized with special tokens parsed and the begin token added; messages
  // go through the model's chat template; ids are used as they are.
  std::optional<std::string> text;
  nlohmann::json messages;  // [{"role","content"}, …] or null
  std::vector<int32_t> ids;

  std::optional<int64_t> max_tokens;
  std::optional<double> temperature = 0;  // 0: greedy; nullopt: the model's, where model_sampling is set, otherwise 1
  // Parameters that are not named here are those of the model's generation_config.json. False: there are none, so that
  // temperature 0 is the most likely token, without a penalty.
  bool model_sampling = false;
  // Further parameters of sampling, with the names and ranges of the HTTP API; nullopt: as model_sampling says.
  std::optional<double> top_p, min_p, repetition_penalty;
  std::optional<int64_t> top_k, seed;
  bool ignore_eos = false;  // generate max_tokens in any case
  // Prefill and decode method; empty: the server chooses. A model in this process runs exact and dense, and refuses
  // others.
  std::string reuse, decode;
  // Tokens [begin, end) of `ids` that are segments of segment_namespace. In-process runs reuse nothing.
  struct Segment {
    int64_t begin = 0, end = 0;
  };
  std::vector<Segment> segments;
  std::string segment_namespace;
  nlohmann::json reuse_options;  // further members of the API's "splice" object; or null
  // Gets the model's reasoning piece by piece, where the HTTP API separates it from the answer; may be null. False ends
  // the answer.
  std::function<bool(const std::string& piece)> on_reasoning;
};

struct TextResult {
  std::string text;
  std::string finish_reason;  // "stop", "length"; empty: it was stopped
  int64_t prompt_tokens = 0, completion_tokens = 0, cached_tokens = 0;
  double ttft_s = 0, total_s = 0;
  int64_t num_pieces = 0;  // in which the text arrived
  nlohmann::json receipt;  // the server's "splice" object; null: in-process

  // Tokens a second: those after the first while they arrive; of an answer that arrives in one piece, all tokens over
  // the whole time. 0: no tokens, or no time.
  double tokens_per_s() const {
    const bool streamed = num_pieces > 1 && completion_tokens > 1 && total_s > ttft_s;
    if (streamed) return static_cast<double>(completion_tokens - 1) / (total_s - ttft_s);
    return total_s > 0 ? static_cast<double>(completion_tokens) / total_s : 0;
  }
};

// The model behind a TextGenerator.
struct ModelFacts {
  std::string name;
  int64_t max_context = 0;  // tokens; 0: not known
};

// One thread at a time, but for Stop.
class TextGenerator {
 public:
  // Gets the answer piece by piece; returns false to end it.
  using OnText = std::function<bool(const std::string& piece)>;
  virtual ~TextGenerator() = default;
  // Cancelled: Stop ended it.
  virtual absl::StatusOr<TextResult> Generate(const TextRequest& request, const OnText& on_text) = 0;
  // Any thread: ends a Generate that runs, also one that waits for its first piece. A generator that cannot do that
  // ends at the next piece, by on_text.
  virtual void Stop() {}
  // Asks the server for its model, which shows that the server is there and takes the API key. Unavailable: it is not
  // there.
  virtual absl::StatusOr<ModelFacts> DescribeModel() { return ModelFacts{.name = description(), .max_context = 0}; }
  // Token ids of a text, with special tokens parsed and none added.
  virtual absl::StatusOr<std::vector<int32_t>> Tokenize(const std::string& text) = 0;
  virtual std::string description() const = 0;
};

// Makes a generator for a server: "http[s]://HOST:PORT" or "HOST:PORT": the OpenAI-compatible API;
// "grpc[s]://HOST:PORT": the typed API. With TLS the server's certificate is checked like in ApiClient.
// InvalidArgument: the URL or the CA file cannot be used.
absl::StatusOr<std::unique_ptr<TextGenerator>> MakeEndpointGenerator(const Endpoint& endpoint);
// The same for the typed API only.
absl::StatusOr<std::unique_ptr<TextGenerator>> MakeGrpcGenerator(const Endpoint& endpoint);
// Values of --model, --random-weights, --endpoint and related flags. MakeTextGenerator returns InvalidArgument unless
// exactly one source is given.
struct SourceFlags {
  ModelSource model;
  std::string tokenizer_dir, endpoint, api_key, ca_file;
  std::string backend = "auto", kv_dtype = "auto";
  int32_t num_threads = 0;
  int32_t tp = 1;
  // Used for a model in this process (router::ServedModelOptions); a server has its own.
  bool special_tokens_in_text = false;
  std::string generation_config = "auto";
};
absl::StatusOr<std::unique_ptr<TextGenerator>> MakeTextGenerator(const SourceFlags& flags);
// Loads the flags' model into this process. tokenizer_dir "": the model's folder; a model with random weights has none.
absl::StatusOr<std::unique_ptr<TextGenerator>> MakeLocalTextGenerator(const SourceFlags& flags);

}  // namespace spl::cli
