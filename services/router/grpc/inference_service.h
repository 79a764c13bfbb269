// The public gRPC API: translates messages to requests and output to messages, and nothing else.
#pragma once

#include <functional>
#include <string>

#include "services/router/admission/auth.h"
#include "services/router/admission/fair_pool.h"
#include "services/router/dispatch/dispatcher.h"
#include "services/router/kb/knowledge_bases.h"
#include "spl/v1/inference.grpc.pb.h"

namespace spl::router {

// A callback service: gRPC's threads only enqueue. Borrows all arguments.
class InferenceService final : public v1::Inference::CallbackService {
 public:
  InferenceService(Dispatcher& core, KnowledgeBases& bases, const ApiKeys& keys, FairPool& pool)
      : core_(core), bases_(bases), keys_(keys), pool_(pool) {}

  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(grpc::CallbackServerContext* context,
                                                           const v1::GenerateRequest* request) override;
  grpc::ServerUnaryReactor* CountTokens(grpc::CallbackServerContext* context, const v1::CountTokensRequest* request,
                                        v1::CountTokensResponse* response) override;
  grpc::ServerUnaryReactor* ListModels(grpc::CallbackServerContext* context, const v1::ListModelsRequest* request,
                                       v1::ListModelsResponse* response) override;

 private:
  // Calls `done` once; `request` and `response` must live until then.
  void Count(const Caller& caller, const v1::CountTokensRequest& request, v1::CountTokensResponse* response,
             const std::function<void(const absl::Status&)>& done) const;
  absl::Status CountResolved(const v1::CountTokensRequest& request, const Prompt& prompt,
                             v1::CountTokensResponse* response) const;
  absl::StatusOr<Caller> Authenticate(const grpc::CallbackServerContext& context) const;

  Dispatcher& core_;
  KnowledgeBases& bases_;
  const ApiKeys& keys_;
  FairPool& pool_;
};

// `defaults`: values of the sampling parameters that the request does not name. InvalidArgument names the field.
absl::StatusOr<GenerationRequest> FromProto(const v1::GenerateRequest& request, const Sampling& defaults = {});

}  // namespace spl::router
