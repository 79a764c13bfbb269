#include "tools/cli/text_generator.h"

#include <chrono>
#include <mutex>
#include <random>

#include "services/base/status.h"
#include "services/engine/engine.h"
#include "services/methods/methods.h"
#include "services/router/request/served_model.h"
#include "services/tokenizer/tokenizer.h"
#include "services/worker_flags/worker_flags.h"
#include "tools/cli/api_client.h"
#include "tools/cli/load_model.h"

namespace spl::cli {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

double SecondsSince(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

class EndpointGenerator final : public TextGenerator {
 public:
  EndpointGenerator(std::unique_ptr<ApiClient> client, Endpoint endpoint)
      : endpoint_(std::move(endpoint)), client_(std::move(client)) {}

  std::string description() const override { return endpoint_.url; }

  void Stop() override {
    const std::lock_guard lock(mutex_);
    client_->Cancel();
    stopped_ = true;
  }

  absl::StatusOr<ModelFacts> DescribeModel() override {
    SPLICE_ASSIGN_OR_RETURN(const json reply, client_->Get("/v1/models"));
    const auto models = reply.find("data");
    if (models == reply.end() || !models->is_array() || models->empty() || !models->front().is_object())
      return Errorf(absl::StatusCode::kFailedPrecondition, "{}/v1/models names no model", endpoint_.url);
    const json& model = models->front();
    ModelFacts facts;
    if (const auto id = model.find("id"); id != model.end() && id->is_string()) facts.name = id->get<std::string>();
    if (const auto most = model.find("max_model_len"); most != model.end() && most->is_number_integer())
      facts.max_context = most->get<int64_t>();
    return facts;
  }

  absl::StatusOr<std::vector<int32_t>> Tokenize(const std::string& text) override {
    SPLICE_ASSIGN_OR_RETURN(const json reply,
                            client_->Post("/tokenize", {{"prompt", text}, {"add_special_tokens", false}}));
    const auto tokens = reply.find("tokens");
    if (tokens == reply.end() || !tokens->is_array()) return absl::InternalError("/tokenize answered without tokens");
    return tokens->get<std::vector<int32_t>>();
  }

  absl::StatusOr<TextResult> Generate(const TextRequest& request, const OnText& on_text) override {
    SPLICE_RETURN_IF_ERROR(Reconnect());
    json body = {{"stream", true}, {"stream_options", {{"include_usage", true}}}};
    AddSampling(request, body);
    const bool chat = !request.messages.is_null();
    if (chat)
      body["messages"] = request.messages;
    else if (request.text)
      body["prompt"] = *request.text;
    else
      body["prompt"] = request.ids;
    if (request.ignore_eos) body["ignore_eos"] = true;
    if (request.max_tokens) body["max_tokens"] = *request.max_tokens;
    if (!request.reuse.empty()) body["splice"]["reuse"] = request.reuse;
    if (!request.decode.empty()) body["splice"]["decode"] = request.decode;
    if (request.reuse_options.is_object()) body["splice"].update(request.reuse_options);
    for (const TextRequest::Segment& segment : request.segments)
      body["splice"]["segments"].push_back(
          {{"begin", segment.begin}, {"end", segment.end}, {"namespace", request.segment_namespace}});
    TextResult result;
    const auto start = Clock::now();
    const auto on_event = [&](const json& event) { return Take(event, start, result, on_text, request.on_reasoning); };
    SPLICE_RETURN_IF_ERROR(client_->PostStream(chat ? "/v1/chat/completions" : "/v1/completions", body, on_event));
    result.total_s = SecondsSince(start);
    return result;
  }

 private:
  // A client that Stop has ended takes no more calls.
  absl::Status Reconnect() {
    const std::lock_guard lock(mutex_);
    if (!stopped_) return absl::OkStatus();
    SPLICE_ASSIGN_OR_RETURN(client_, ApiClient::Create(endpoint_));
    stopped_ = false;
    return absl::OkStatus();
  }

  static void AddSampling(const TextRequest& request, json& body) {
    if (!request.model_sampling) {
      const router::Sampling plain;
      body.update({{"temperature", plain.temperature},
                   {"top_k", plain.top_k},
                   {"top_p", plain.top_p},
                   {"min_p", plain.min_p},
                   {"repetition_penalty", plain.repetition_penalty}});
    }
    const auto set = [&](const char* name, const auto& value) {
      if (value) body[name] = *value;
    };
    set("temperature", request.temperature);
    set("top_k", request.top_k);
    set("top_p", request.top_p);
    set("min_p", request.min_p);
    set("repetition_penalty", request.repetition_penalty);
    set("seed", request.seed);
  }

  // A member of the wrong type is the server's bug; it is left out.
  static std::string StringOf(const json& object, const char* name) {
    const auto text = object.find(name);
    return text != object.end() && text->is_string() ? text->get<std::string>() : "";
  }
  static std::string Piece(const json& choice, const char* member) {
    const auto delta = choice.find("delta");
    return delta != choice.end() && delta->is_object() ? StringOf(*delta, member) : "";
  }

  static bool Take(const json& event, Clock::time_point start, TextResult& result, const OnText& on_text,
                   const OnText& on_reasoning) {
    if (const auto usage = event.find("usage"); usage != event.end() && usage->is_object()) {
      result.prompt_tokens = usage->value("prompt_tokens", int64_t{0});
      result.completion_tokens = usage->value("completion_tokens", int64_t{0});
      result.cached_tokens = usage->value("/prompt_tokens_details/cached_tokens"_json_pointer, int64_t{0});
    }
    if (const auto receipt = event.find("splice"); receipt != event.end()) result.receipt = *receipt;
    const auto choices = event.find("choices");
    if (choices == event.end() || !choices->is_array() || choices->empty()) return true;
    const json& choice = (*choices)[0];
    const std::string piece = choice.contains("text") ? StringOf(choice, "text") : Piece(choice, "content");
    const std::string reasoning = Piece(choice, "reasoning_content");
    if (const auto reason = choice.find("finish_reason"); reason != choice.end() && reason->is_string())
      result.finish_reason = reason->get<std::string>();
    if (piece.empty() && reasoning.empty()) return true;
    if (result.num_pieces++ == 0) result.ttft_s = SecondsSince(start);
    if (!reasoning.empty() && on_reasoning && !on_reasoning(reasoning)) return false;
    result.text += piece;
    return piece.empty() || on_text(piece);
  }

  const Endpoint endpoint_;
  std::mutex mutex_;  // guards which client there is, and stopped_
  std::unique_ptr<ApiClient> client_;
  bool stopped_ = false;
};

class LocalTextGenerator final : public TextGenerator {
 public:
  std::unique_ptr<router::ServedModel> served;  // tokenizer, chat template, sampling defaults
  std::unique_ptr<engine::LocalGenerator> generator;

  std::string description() const override { return generator->model().config().name + " (in process)"; }

  absl::StatusOr<ModelFacts> DescribeModel() override {
    const engine::ModelConfig& config = generator->model().config();
    return ModelFacts{.name = config.name, .max_context = config.max_positions};
  }

  absl::StatusOr<std::vector<int32_t>> Tokenize(const std::string& text) override {
    return served->tokenizer().Encode(text, {.add_special_tokens = false, .parse_special_tokens = true});
  }

  absl::StatusOr<TextResult> Generate(const TextRequest& request, const OnText& on_text) override {
    SPLICE_RETURN_IF_ERROR(CheckMethods(request));
    SPLICE_ASSIGN_OR_RETURN(const std::vector<int32_t> prompt, PromptIds(request));
    const tokenizer::Tokenizer& tokenizer = served->tokenizer();
    tokenizer::StreamDecoder decoder(tokenizer, {.skip_special_tokens = true});
    TextResult result{.prompt_tokens = static_cast<int64_t>(prompt.size())};
    const auto start = Clock::now();
    const auto deliver = [&](const std::string& piece) {
      ++result.num_pieces;
      result.text += piece;
      return on_text(piece);
    };
    absl::Status decoded;
    const auto on_token = [&](int32_t, const engine::SampledToken& token) {
      if (result.completion_tokens++ == 0) result.ttft_s = SecondsSince(start);
      if (token.finish == engine::FinishReason::kStop) {
        result.finish_reason = "stop";
        return true;
      }
      if (token.finish == engine::FinishReason::kLength) result.finish_reason = "length";
      // Rows of the embedding beyond the tokenizer's vocabulary have no text.
      if (token.token >= tokenizer.vocab_size()) return true;
      auto piece = decoder.Append(token.token);
      if (!piece.ok()) return decoded = piece.status(), false;
      return piece->empty() || deliver(*piece);
    };
    SPLICE_RETURN_IF_ERROR(generator->Generate(prompt, SamplingOf(request), on_token));
    SPLICE_RETURN_IF_ERROR(decoded);
    if (const std::string rest = decoder.Finish(); !rest.empty()) deliver(rest);
    result.total_s = SecondsSince(start);
    return result;
  }

 private:
  static absl::Status CheckMethods(const TextRequest& request) {
    const auto check = [](const std::string& method, const char* flag, std::string_view own) -> absl::Status {
      if (method.empty() || methods::IsAuto(method) || method == own) return absl::OkStatus();
      return InvalidArgument("{} {}: a model in this process runs {} only; start splice serve and give --endpoint",
                             flag, method, own);
    };
    SPLICE_RETURN_IF_ERROR(check(request.reuse, "--reuse", methods::kExact));
    return check(request.decode, "--decode", methods::kDense);
  }

  engine::SamplingParams SamplingOf(const TextRequest& request) const {
    const router::Sampling from = request.model_sampling ? served->default_sampling() : router::Sampling();
    engine::SamplingParams sampling;
    sampling.temperature = request.temperature ? static_cast<float>(*request.temperature) : from.temperature;
    sampling.top_k = static_cast<int32_t>(request.top_k.value_or(from.top_k));
    sampling.top_p = static_cast<float>(request.top_p.value_or(from.top_p));
    sampling.min_p = static_cast<float>(request.min_p.value_or(from.min_p));
    sampling.repetition_penalty = static_cast<float>(request.repetition_penalty.value_or(from.repetition_penalty));
    sampling.seed = request.seed ? static_cast<uint64_t>(*request.seed) : std::random_device()();
    sampling.ignore_eos = request.ignore_eos;
    if (request.max_tokens) sampling.max_tokens = *request.max_tokens;
    return sampling;
  }

  absl::StatusOr<std::vector<int32_t>> PromptIds(const TextRequest& request) const {
    router::Prompt prompt;
    if (request.messages.is_null()) {
      if (!request.text) return request.ids;
      prompt = *request.text;
    } else {
      router::ChatPrompt chat;
      for (const json& message : request.messages) {
        if (!message.is_object() || !message.contains("role") || !message["role"].is_string() ||
            !message.contains("content") || !message["content"].is_string())
          return absl::InvalidArgumentError("messages: each needs a string 'role' and a string 'content'");
        chat.messages.push_back({message["role"].get<std::string>(), message["content"].get<std::string>()});
      }
      prompt = std::move(chat);
    }
    SPLICE_ASSIGN_OR_RETURN(router::TokenizedPrompt tokens, served->Tokenize(prompt, true));
    return std::move(tokens.ids);
  }
};

}  // namespace

absl::StatusOr<std::unique_ptr<TextGenerator>> MakeEndpointGenerator(const Endpoint& endpoint) {
  if (endpoint.url.starts_with("grpc://") || endpoint.url.starts_with("grpcs://")) return MakeGrpcGenerator(endpoint);
  SPLICE_ASSIGN_OR_RETURN(auto client, ApiClient::Create(endpoint));
  return std::make_unique<EndpointGenerator>(std::move(client), endpoint);
}

absl::StatusOr<std::unique_ptr<TextGenerator>> MakeLocalTextGenerator(const SourceFlags& flags) {
  const std::string& text_dir = flags.tokenizer_dir.empty() ? flags.model.dir : flags.tokenizer_dir;
  if (text_dir.empty())
    return absl::InvalidArgumentError("a model with random weights has no tokenizer; give --tokenizer DIR");
  auto local = std::make_unique<LocalTextGenerator>();
  SPLICE_ASSIGN_OR_RETURN(local->served,
                          router::ServedModel::Load({.dir = text_dir,
                                                     .max_context = 1,  // not read here: the engine checks the length
                                                     .special_tokens_in_text = flags.special_tokens_in_text,
                                                     .generation_config = flags.generation_config}));
  SPLICE_ASSIGN_OR_RETURN(auto model, LoadModelAndShow(flags.model, flags.backend, flags.kv_dtype, flags.tp));
  SPLICE_ASSIGN_OR_RETURN(local->generator, engine::LocalGenerator::Create(
                                                std::move(model), {.executor = {.num_threads = flags.num_threads}}));
  return local;
}

absl::StatusOr<std::unique_ptr<TextGenerator>> MakeTextGenerator(const SourceFlags& flags) {
  const bool local = !flags.model.dir.empty() || !flags.model.random_weights.empty();
  if (local == !flags.endpoint.empty())
    return absl::InvalidArgumentError("give one of --model DIR, --random-weights SHAPE and --endpoint URL");
  return local ? MakeLocalTextGenerator(flags)
               : MakeEndpointGenerator({.url = flags.endpoint, .api_key = flags.api_key, .ca_file = flags.ca_file});
}

}  // namespace spl::cli
