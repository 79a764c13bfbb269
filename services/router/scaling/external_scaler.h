// The router as an external scaler of KEDA (proto/externalscaler): one metric per pool, the planner's desired replicas,
// with a target of 1 for each replica, so that the autoscaler's quotient is that number.
#pragma once

#include <grpcpp/grpcpp.h>

#include "externalscaler/externalscaler.grpc.pb.h"
#include "services/router/scaling/live_planner.h"

namespace spl::router {

// Serves on the router's gRPC port. Any thread; nothing blocks. Errors: INVALID_ARGUMENT for a pool that is neither
// "prefill" nor "decode" (metadata "pool" of the trigger), UNAVAILABLE before the first plan: KEDA then leaves the pool
// as it is. No API key is asked for (KEDA sends none): the numbers say how many workers there are, nothing else.
// Whoever must not know that must not reach the port (network policies).
class ExternalScaler final : public externalscaler::ExternalScaler::CallbackService {
 public:
  explicit ExternalScaler(const LivePlanner& planner) : planner_(planner) {}

  // The pools are always active: scaling to zero is the operator's (minReplicaCount), not ours.
  grpc::ServerUnaryReactor* IsActive(grpc::CallbackServerContext* context,
                                     const externalscaler::ScaledObjectRef* request,
                                     externalscaler::IsActiveResponse* response) override;
  // One message, then open until the caller leaves: there is never another answer.
  grpc::ServerWriteReactor<externalscaler::IsActiveResponse>* StreamIsActive(
      grpc::CallbackServerContext* context, const externalscaler::ScaledObjectRef* request) override;
  grpc::ServerUnaryReactor* GetMetricSpec(grpc::CallbackServerContext* context,
                                          const externalscaler::ScaledObjectRef* request,
                                          externalscaler::GetMetricSpecResponse* response) override;
  grpc::ServerUnaryReactor* GetMetrics(grpc::CallbackServerContext* context,
                                       const externalscaler::GetMetricsRequest* request,
                                       externalscaler::GetMetricsResponse* response) override;

 private:
  const LivePlanner& planner_;
};

}  // namespace spl::router
