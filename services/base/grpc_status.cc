#include "services/base/grpc_status.h"

#include <charconv>
#include <string>

#include "services/base/status.h"

namespace spl {
namespace {

constexpr char kRetryAfterKey[] = "retry-after-ms";

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), MessageOf(status));
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const std::string& message = status.error_message();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                      absl::string_view(message.data(), message.size()));
}

void SetRetryAfter(grpc::ServerContextBase& context, std::chrono::milliseconds delay) {
  context.AddTrailingMetadata(kRetryAfterKey, std::to_string(delay.count()));
}

std::optional<std::chrono::milliseconds> RetryAfterOf(const grpc::ClientContext& context) {
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto found = trailers.find(kRetryAfterKey);
  if (found == trailers.end()) return std::nullopt;
  int64_t delay_ms = 0;
  const char* const begin = found->second.data();
  const char* const end = begin + found->second.size();
  const auto [parsed_to, error] = std::from_chars(begin, end, delay_ms);
  if (error != std::errc() || parsed_to != end || delay_ms < 0) return std::nullopt;
  return std::chrono::milliseconds(delay_ms);
}

std::chrono::system_clock::time_point ToGrpcDeadline(std::chrono::steady_clock::time_point deadline) {
  using std::chrono::steady_clock;
  using std::chrono::system_clock;
  const auto left = deadline - steady_clock::now();
  if (left > std::chrono::hours(24 * 365)) return system_clock::time_point::max();
  return system_clock::now() + std::chrono::duration_cast<system_clock::duration>(left);
}

std::chrono::steady_clock::time_point FromGrpcDeadline(std::chrono::system_clock::time_point deadline) {
  using std::chrono::steady_clock;
  using std::chrono::system_clock;
  const auto left = deadline - system_clock::now();
  if (left > std::chrono::hours(24 * 365)) return steady_clock::time_point::max();
  return steady_clock::now() + left;
}

}  // namespace spl
