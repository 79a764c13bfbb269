#include "services/router/scaling/external_scaler.h"

#include <atomic>

#include "absl/status/statusor.h"
#include "services/base/grpc_status.h"
#include "services/base/status.h"

namespace spl::router {
namespace {

absl::StatusOr<Pool> PoolOf(const externalscaler::ScaledObjectRef& object) {
  const auto it = object.scalermetadata().find("pool");
  const std::string name = it == object.scalermetadata().end() ? "" : it->second;
  for (const Pool pool : kPools) {
    if (name == PoolName(pool)) return pool;
  }
  return InvalidArgument("the trigger's metadata \"pool\" must be prefill or decode, got \"{}\"", name);
}

std::string MetricName(Pool pool) { return std::string("splice-desired-") + PoolName(pool); }

grpc::ServerUnaryReactor* Finish(grpc::CallbackServerContext* context, const absl::Status& status) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

class ActiveStream final : public grpc::ServerWriteReactor<externalscaler::IsActiveResponse> {
 public:
  explicit ActiveStream(const absl::Status& status) {
    if (status.ok()) {
      response_.set_result(true);
      StartWrite(&response_);
    } else {
      FinishOnce(ToGrpcStatus(status));
    }
  }

 private:
  void FinishOnce(const grpc::Status& status) {
    if (!finished_.exchange(true)) Finish(status);
  }
  void OnWriteDone(bool ok) override {
    if (!ok) FinishOnce(grpc::Status::CANCELLED);
  }
  void OnCancel() override { FinishOnce(grpc::Status::CANCELLED); }
  void OnDone() override { delete this; }

  externalscaler::IsActiveResponse response_;
  std::atomic<bool> finished_{false};
};

}  // namespace

grpc::ServerUnaryReactor* ExternalScaler::IsActive(grpc::CallbackServerContext* context,
                                                   const externalscaler::ScaledObjectRef* request,
                                                   externalscaler::IsActiveResponse* response) {
  response->set_result(true);
  return Finish(context, PoolOf(*request).status());
}

grpc::ServerWriteReactor<externalscaler::IsActiveResponse>* ExternalScaler::StreamIsActive(
    grpc::CallbackServerContext*, const externalscaler::ScaledObjectRef* request) {
  return new ActiveStream(PoolOf(*request).status());
}

grpc::ServerUnaryReactor* ExternalScaler::GetMetricSpec(grpc::CallbackServerContext* context,
                                                        const externalscaler::ScaledObjectRef* request,
                                                        externalscaler::GetMetricSpecResponse* response) {
  const absl::StatusOr<Pool> pool = PoolOf(*request);
  if (!pool.ok()) return Finish(context, pool.status());
  externalscaler::MetricSpec& spec = *response->add_metricspecs();
  spec.set_metricname(MetricName(*pool));
  spec.set_targetsize(1);
  spec.set_targetsizefloat(1);
  return Finish(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* ExternalScaler::GetMetrics(grpc::CallbackServerContext* context,
                                                     const externalscaler::GetMetricsRequest* request,
                                                     externalscaler::GetMetricsResponse* response) {
  const absl::StatusOr<Pool> pool = PoolOf(request->scaledobjectref());
  if (!pool.ok()) return Finish(context, pool.status());
  const std::map<Pool, PoolPlan> plan = planner_.plan();
  const auto it = plan.find(*pool);
  if (it == plan.end()) {
    return Finish(context, Errorf(absl::StatusCode::kUnavailable,
                                  "there is no plan yet: no workers, or less than an interval has passed"));
  }
  externalscaler::MetricValue& value = *response->add_metricvalues();
  value.set_metricname(MetricName(*pool));
  value.set_metricvalue(it->second.desired);
  value.set_metricvaluefloat(it->second.desired);
  return Finish(context, absl::OkStatus());
}

}  // namespace spl::router
