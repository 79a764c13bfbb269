// The parts of a Hugging Face hub's HTTP API that fetch a model: the list of its files, and a file.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "services/base/http_client.h"
#include "services/base/http_url.h"
#include "services/hub/pull_record.h"

namespace spl::hub {

inline constexpr char kDefaultHub[] = "https://huggingface.co";

struct HubOptions {
  std::string url = kDefaultHub;              // http[s]://HOST[:PORT][/BASE]
  std::string token;                          // bearer token; empty: none is sent. Only the hub itself gets it
  std::string ca_file;                        // CAs that signed the servers' certificates; empty: the system's
  std::string ca_flag = "--ca";               // for messages
  std::chrono::milliseconds timeout{30'000};  // to connect and get the head of an answer, and between two pieces
};

struct HubListing {
  std::string commit;  // that the revision stands for now
  std::vector<HubFile> files;
};

// One thread at a time, but for Cancel. Keeps a connection to each server that it talked to.
class HubClient {
 public:
  // The part of a file's answer before its bytes.
  struct FileHead {
    uint64_t offset =
        0;              // first byte that follows: the one that was asked for, or 0 if the server sends the whole file
    uint64_t size = 0;  // whole file; 0: not told
    FileDigest digest;  // from the hub's own answer
  };
  struct FileSink {
    // An error ends the call and is its result.
    std::function<absl::Status(const FileHead&)> on_head;
    std::function<absl::Status(std::string_view)> on_data;
  };

  // InvalidArgument: the URL or the CA file cannot be used, or the token would travel unencrypted to another machine.
  static absl::StatusOr<std::unique_ptr<HubClient>> Create(const HubOptions& options);

  // The files of a model. PermissionDenied: gated or private. NotFound: no such repository or revision. Unavailable and
  // DeadlineExceeded: worth another try. Messages say what to do.
  absl::StatusOr<HubListing> List(const ModelName& name);
  // Gets a file's bytes from `offset` on, as they are at `commit`. Follows redirects, also to other hosts, but not from
  // https:// to http://. Errors: those of List and of the sink. OutOfRange: the file is not longer than `offset`.
  absl::Status Fetch(const std::string& repository, const std::string& commit, const std::string& file, uint64_t offset,
                     const FileSink& sink);
  // False when cancelled. Takes longer if the hub has asked for that (Retry-After, at most a minute).
  bool Pause(std::chrono::milliseconds time);

  // Any thread: ends what runs and all that would, with Cancelled.
  void Cancel();

 private:
  struct Request;
  explicit HubClient(HubOptions options) : options_(std::move(options)) {}

  absl::StatusOr<HttpClient*> ClientOf(const HttpUrl& url);
  absl::Status Send(Request& request);
  absl::Status ErrorOf(const Request& request, const HttpHead& head, const std::string& body);

  const HubOptions options_;
  HttpUrl hub_;
  std::shared_ptr<const TlsTrust> trust_;
  std::chrono::milliseconds retry_after_{0};
  std::mutex mutex_;  // guards the rest
  std::condition_variable cancel_;
  std::map<std::string, std::unique_ptr<HttpClient>> clients_;  // by origin; never removed
  bool cancelled_ = false;
};

}  // namespace spl::hub
