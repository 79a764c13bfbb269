// The router as an external scaler of KEDA (proto/externalscaler). There is one metric per pool, the planner's desired
// number of replicas, with a target of 1 per replica, so that the autoscaler's quotient is that number.
#pragma once

#include <grpcpp/grpcpp.h>

#include "externalscaler/externalscaler.grpc.pb.h"
#include "services/router/scaling/live_planner.h"

namespace spl::router {

// Serves on the router's gRPC port. Any thread may call; never blocks. INVALID_ARGUMENT: a pool that is neither
// "prefill" nor "decode" (metadata "pool" of the trigger). UNAVAILABLE: before the first plan; KEDA then leaves the
// pool as it is. No API key is required (KEDA sends none): the numbers reveal only how many workers there are. To hide
// even that, restrict access to the port (network policies).
class ExternalScaler final : public externalscaler::ExternalScaler::CallbackService {
 public:
  explicit ExternalScaler(const LivePlanner& planner) : planner_(planner) {}

  // The pools are always active: the operator decides about scaling to zero (minReplicaCount).
  grpc::ServerUnaryReactor* IsActive(grpc::CallbackServerContext* context,
                                     const externalscaler::ScaledObjectRef* request,
                                     externalscaler::IsActiveResponse* response) override;
  // Sends one message, then stays open until the caller leaves: the answer never changes.
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
