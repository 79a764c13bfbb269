// Text in, text out, for the tools: the same interface over a running server and over the plain in-process model.
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
  // One of the three. Text is tokenized with special tokens parsed and the begin token added; messages go through the
  // model's chat template; ids are taken as they are.
  std::optional<std::string> text;
  nlohmann::json messages;  // [{"role","content"}, …] or null
  std::vector<int32_t> ids;

  std::optional<int64_t> max_tokens;
  double temperature = 0;
  bool ignore_eos = false;    // go on to max_tokens
  std::string reuse, decode;  // policy and selector names; empty: the server's choice
  // Tokens [begin, end) of `ids` that are segments, of this namespace. In-process runs reuse nothing.
  struct Segment {
    int64_t begin = 0, end = 0;
  };
  std::vector<Segment> segments;
  std::string segment_namespace;
  nlohmann::json reuse_options;  // further members of the API's "splice" object, or null
};

struct TextResult {
  std::string text;
  std::string finish_reason;  // "stop", "length"
  int64_t prompt_tokens = 0, completion_tokens = 0, cached_tokens = 0;
  double ttft_s = 0, total_s = 0;
  nlohmann::json receipt;  // the server's "splice" object; null in-process

  double tokens_per_s() const {  // after the first token
    return completion_tokens > 1 && total_s > ttft_s ? double(completion_tokens - 1) / (total_s - ttft_s) : 0;
  }
};

// One thread at a time.
class TextGenerator {
 public:
  // `on_text` sees the answer piece by piece; false ends it.
  using OnText = std::function<bool(const std::string& piece)>;
  virtual ~TextGenerator() = default;
  virtual absl::StatusOr<TextResult> Generate(const TextRequest& request, const OnText& on_text) = 0;
  // Ids of a text with special tokens parsed and nothing added.
  virtual absl::StatusOr<std::vector<int32_t>> Tokenize(const std::string& text) = 0;
  virtual std::string description() const = 0;
};

// "http[s]://HOST:PORT" or "HOST:PORT": the OpenAI-compatible API. "grpc[s]://HOST:PORT": the typed one. With TLS the
// server's certificate is checked as ApiClient does it. InvalidArgument: the URL or the CA file cannot be used.
absl::StatusOr<std::unique_ptr<TextGenerator>> MakeEndpointGenerator(const Endpoint& endpoint);
// The typed API of it alone.
absl::StatusOr<std::unique_ptr<TextGenerator>> MakeGrpcGenerator(const Endpoint& endpoint);
// Loads the model into this process. max_context 0: the model's own.
// tokenizer_dir "": the model's folder; a model with random weights has none.
absl::StatusOr<std::unique_ptr<TextGenerator>> MakeLocalTextGenerator(const ModelSource& model,
                                                                      const std::string& tokenizer_dir,
                                                                      const std::string& backend, int32_t num_threads,
                                                                      int32_t tp = 1);

// What --model / --random-weights / --endpoint of a tool chose; InvalidArgument unless exactly one is given.
struct SourceFlags {
  ModelSource model;
  std::string tokenizer_dir, endpoint, api_key, ca_file;
  std::string backend = "auto";
  int32_t num_threads = 0;
  int32_t tp = 1;
};
absl::StatusOr<std::unique_ptr<TextGenerator>> MakeTextGenerator(const SourceFlags& flags);

}  // namespace spl::cli
