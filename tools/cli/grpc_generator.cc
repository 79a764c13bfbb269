// TextGenerator over the typed gRPC API (grpc[s]://HOST:PORT).
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <mutex>

#include "services/base/address.h"
#include "services/base/certificate_files.h"
#include "services/base/grpc_status.h"
#include "services/base/status.h"
#include "services/router/request/openai_response.h"
#include "services/router/request/reuse_json.h"
#include "services/router/request/wire.h"
#include "spl/v1/inference.grpc.pb.h"
#include "tools/cli/text_generator.h"

namespace spl::cli {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

constexpr std::chrono::seconds kDescribeTimeout{10};

// The members of the HTTP API's "splice" object are options, and these two.
absl::Status SetReuse(const TextRequest& request, v1::GenerateRequest& proto) {
  if (!request.reuse_options.is_null()) {
    const router::Json options = request.reuse_options;
    router::ObjectReader reader(options, "splice.");
    reader.String("namespace", proto.mutable_namespace_name());
    reader.String("session", proto.mutable_session());
    router::ReadReuseOptions(reader, *proto.mutable_reuse());
    SPLICE_RETURN_IF_ERROR(reader.Finish());
  }
  proto.mutable_reuse()->set_policy(request.reuse);
  proto.mutable_reuse()->set_decode(request.decode);
  for (const TextRequest::Segment& segment : request.segments) {
    auto* out = proto.mutable_prompt()->mutable_tokens()->add_segments();
    out->set_begin(static_cast<uint32_t>(segment.begin));
    out->set_end(static_cast<uint32_t>(segment.end));
    out->set_namespace_name(request.segment_namespace);
  }
  return absl::OkStatus();
}

void SetSampling(const TextRequest& request, v1::SamplingParams& sampling) {
  if (request.temperature) sampling.set_temperature(static_cast<float>(*request.temperature));
  if (request.top_k) sampling.set_top_k(static_cast<uint32_t>(*request.top_k));
  if (request.top_p) sampling.set_top_p(static_cast<float>(*request.top_p));
  if (request.min_p) sampling.set_min_p(static_cast<float>(*request.min_p));
  if (request.repetition_penalty) sampling.set_repetition_penalty(static_cast<float>(*request.repetition_penalty));
  if (request.seed) sampling.set_seed(static_cast<uint64_t>(*request.seed));
  sampling.set_ignore_eos(request.ignore_eos);
  if (request.max_tokens) sampling.set_max_tokens(static_cast<uint32_t>(*request.max_tokens));
}

class GrpcGenerator final : public TextGenerator {
 public:
  GrpcGenerator(const std::shared_ptr<grpc::Channel>& channel, const Endpoint& endpoint)
      : stub_(v1::Inference::NewStub(channel)), description_(endpoint.url), api_key_(endpoint.api_key) {}

  std::string description() const override { return description_; }

  void Stop() override {
    const std::lock_guard lock(mutex_);
    if (running_ != nullptr) running_->TryCancel();
  }

  absl::StatusOr<ModelFacts> DescribeModel() override {
    v1::ListModelsResponse response;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kDescribeTimeout);
    Authorize(context);
    SPLICE_RETURN_IF_ERROR(StatusOf(stub_->ListModels(&context, v1::ListModelsRequest(), &response)));
    if (response.models().empty())
      return Errorf(absl::StatusCode::kFailedPrecondition, "{} names no model", description_);
    return ModelFacts{.name = response.models(0).name(), .max_context = response.models(0).max_context()};
  }

  absl::StatusOr<std::vector<int32_t>> Tokenize(const std::string& text) override {
    v1::CountTokensRequest request;
    v1::CountTokensResponse response;
    request.mutable_prompt()->set_text(text);
    request.set_return_ids(true);
    grpc::ClientContext context;
    Authorize(context);
    SPLICE_RETURN_IF_ERROR(StatusOf(stub_->CountTokens(&context, request, &response)));
    return std::vector<int32_t>(response.ids().begin(), response.ids().end());
  }

  absl::StatusOr<TextResult> Generate(const TextRequest& request, const OnText& on_text) override {
    v1::GenerateRequest proto;
    for (const json& message : request.messages) {
      auto* out = proto.mutable_prompt()->mutable_chat()->add_messages();
      out->set_role(message.value("role", ""));
      out->set_content(message.value("content", ""));
    }
    if (request.messages.is_null() && request.text) proto.mutable_prompt()->set_text(*request.text);
    if (request.messages.is_null() && !request.text)
      proto.mutable_prompt()->mutable_tokens()->mutable_ids()->Assign(request.ids.begin(), request.ids.end());
    if (!request.model_sampling) *proto.mutable_sampling() = router::ToProto(router::Sampling());
    SetSampling(request, *proto.mutable_sampling());
    SPLICE_RETURN_IF_ERROR(SetReuse(request, proto));
    grpc::ClientContext context;
    const Running running(*this, context);
    Authorize(context);
    const auto start = Clock::now();
    const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
    auto reader = stub_->Generate(&context, proto);
    TextResult result;
    v1::GenerateResponse response;
    while (reader->Read(&response)) {
      if (response.has_delta() && !response.delta().text().empty()) {
        if (result.num_pieces++ == 0) result.ttft_s = seconds();
        result.text += response.delta().text();
        if (!on_text(response.delta().text())) context.TryCancel();
      }
      if (response.has_delta() && response.delta().finish_reason() != v1::FINISH_REASON_UNSPECIFIED)
        result.finish_reason = response.delta().finish_reason() == v1::FINISH_REASON_LENGTH ? "length" : "stop";
      if (response.has_final()) {
        result.prompt_tokens = response.final().prompt_tokens();
        result.completion_tokens = response.final().completion_tokens();
        result.cached_tokens = response.final().receipt().cached_tokens();
        result.receipt = router::ReceiptJson(response.final().receipt());
      }
    }
    SPLICE_RETURN_IF_ERROR(StatusOf(reader->Finish()));
    result.total_s = seconds();
    return result;
  }

 private:
  // Lets Stop find the call while it runs.
  class Running {
   public:
    Running(GrpcGenerator& owner, grpc::ClientContext& context) : owner_(owner) {
      const std::lock_guard lock(owner_.mutex_);
      owner_.running_ = &context;
    }
    ~Running() {
      const std::lock_guard lock(owner_.mutex_);
      owner_.running_ = nullptr;
    }
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;

   private:
    GrpcGenerator& owner_;
  };

  static absl::Status StatusOf(const grpc::Status& status) {
    if (status.error_message().find("certificate verify failed") == std::string::npos) return FromGrpcStatus(status);
    return Errorf(absl::StatusCode::kUnavailable,
                  "the server's certificate is not believed; {} FILE names the CA that has signed it ({})", kCaFlag,
                  status.error_message());
  }
  void Authorize(grpc::ClientContext& context) const {
    if (!api_key_.empty()) context.AddMetadata("authorization", "Bearer " + api_key_);
  }

  const std::unique_ptr<v1::Inference::Stub> stub_;
  const std::string description_;
  const std::string api_key_;
  std::mutex mutex_;                        // guards running_
  grpc::ClientContext* running_ = nullptr;  // of the Generate that runs; null: none
};

}  // namespace

absl::StatusOr<std::unique_ptr<TextGenerator>> MakeGrpcGenerator(const Endpoint& endpoint) {
  const bool tls = endpoint.url.starts_with("grpcs://");
  const std::string address = endpoint.url.substr(tls ? 8 : 7);
  if (auto parsed = ParseHostPort(address); !parsed.ok()) return Annotate(parsed.status(), endpoint.flag);
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  if (tls) {
    grpc::SslCredentialsOptions options;  // no file given: the CAs that gRPC finds
    if (!endpoint.ca_file.empty()) {
      SPLICE_ASSIGN_OR_RETURN(options.pem_root_certs, ReadCaFile(kCaFlag, endpoint.ca_file));
    }
    credentials = grpc::SslCredentials(options);
  }
  return std::make_unique<GrpcGenerator>(grpc::CreateChannel(address, credentials), endpoint);
}

}  // namespace spl::cli
