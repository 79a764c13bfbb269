#include "services/hub/hub_client.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>

#include "services/base/address.h"
#include "services/base/status.h"

namespace spl::hub {
namespace {

using nlohmann::json;

constexpr int kMaxRedirects = 8;
constexpr size_t kMaxListing = 64 << 20;
constexpr size_t kMaxErrorBody = 16 << 10;
constexpr std::chrono::milliseconds kMaxRetryAfter{60'000};

uint64_t NumberOf(std::string_view text) {
  uint64_t number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

bool IsRedirect(int status) {
  return status == 301 || status == 302 || status == 303 || status == 307 || status == 308;
}

// "bytes FIRST-LAST/SIZE": first and size.
std::pair<uint64_t, uint64_t> RangeOf(const std::string& field) {
  const size_t digits = field.find_first_of("0123456789"), slash = field.find('/');
  if (digits == field.npos || slash == field.npos) return {0, 0};
  return {NumberOf(field.substr(digits)), NumberOf(field.substr(slash + 1))};
}

std::string EncodedPath(const std::string& path) {
  std::string out;
  for (size_t begin = 0;; ++begin) {
    const size_t end = std::min(path.find('/', begin), path.size());
    out += PercentEncode(path.substr(begin, end - begin));
    if (end == path.size()) return out;
    out += '/';
    begin = end;
  }
}

absl::StatusOr<HubListing> ParseListing(const std::string& text, const std::string& where) {
  const json root = json::parse(text, nullptr, /*allow_exceptions=*/false);
  try {
    HubListing listing;
    listing.commit = root.at("sha").get<std::string>();
    if (DigestOfEtag(listing.commit).kind != FileDigest::Kind::kGitBlob)
      return Errorf(absl::StatusCode::kInternal, "{}: '{}' is no commit", where, listing.commit);
    for (const json& entry : root.at("siblings")) {
      HubFile file{entry.at("rfilename").get<std::string>(), entry.value("size", uint64_t{0}), {}};
      if (const auto lfs = entry.find("lfs"); lfs != entry.end() && lfs->is_object()) {
        file.size = lfs->value("size", file.size);
        file.digest = ParseFileDigest("sha256:" + lfs->value("sha256", std::string()));
      } else {
        file.digest = ParseFileDigest("git:" + entry.value("blobId", std::string()));
      }
      listing.files.push_back(std::move(file));
    }
    return listing;
  } catch (const json::exception& error) {
    return Errorf(absl::StatusCode::kInternal, "{}: not the answer of a hub: {}", where, error.what());
  }
}

}  // namespace

// One call, through all its redirects.
struct HubClient::Request {
  std::string repository;
  HttpUrl url;
  uint64_t offset = 0;
  FileDigest digest;  // from the hub's answers on the way
  // Called for an answer of 200, 206.
  std::function<absl::Status(const HttpHead&)> on_head;
  std::function<absl::Status(std::string_view)> on_data;
};

absl::StatusOr<std::unique_ptr<HubClient>> HubClient::Create(const HubOptions& options) {
  std::unique_ptr<HubClient> client(new HubClient(options));
  SPLICE_ASSIGN_OR_RETURN(client->hub_, ParseHttpUrl(options.url));
  while (client->hub_.path.ends_with('/')) client->hub_.path.pop_back();
  if (!options.token.empty() && !client->hub_.https && !IsLoopback(client->hub_.HostHeader()))
    return InvalidArgument("{}: the token would travel unencrypted; use an https:// hub, or no token (HF_TOKEN=)",
                           options.url);
  if (std::any_of(options.token.begin(), options.token.end(), [](char c) { return c <= ' ' || c > '~'; }))
    return absl::InvalidArgumentError("the token has a space, a control character or a letter beyond ASCII");
  SPLICE_ASSIGN_OR_RETURN(client->trust_, TlsTrust::Load(options.ca_flag, options.ca_file));
  return client;
}

absl::StatusOr<HttpClient*> HubClient::ClientOf(const HttpUrl& url) {
  std::lock_guard lock(mutex_);
  if (cancelled_) return absl::CancelledError("stopped");
  std::unique_ptr<HttpClient>& client = clients_[url.Origin()];
  if (client == nullptr)
    client = std::make_unique<HttpClient>(HttpClientOptions{.host = url.host,
                                                            .port = url.port,
                                                            .server = url.Origin(),
                                                            .trust = url.https ? trust_ : nullptr,
                                                            .timeout = options_.timeout,
                                                            .keep_alive = true});
  return client.get();
}

absl::Status HubClient::Send(Request& request) {
  for (int redirects = 0; redirects <= kMaxRedirects; ++redirects) {
    SPLICE_ASSIGN_OR_RETURN(HttpClient* const client, ClientOf(request.url));
    HttpCall call{.target = request.url.path, .body_timeout = options_.timeout};
    const bool is_hub = request.url.Origin() == hub_.Origin();
    if (is_hub && !options_.token.empty()) call.headers.emplace_back("Authorization", "Bearer " + options_.token);
    if (request.offset > 0) call.headers.emplace_back("Range", fmt::format("bytes={}-", request.offset));
    HttpHead head;
    std::string rest;  // body of an answer that is not the file
    absl::Status taken;
    const auto on_head = [&](const HttpHead& answer) {
      head = answer;
      if (is_hub) {
        std::string etag = head.Field("x-linked-etag");
        if (etag.empty()) etag = head.Field("etag");
        if (const FileDigest digest = DigestOfEtag(etag); digest.known()) request.digest = digest;
      }
      if (head.status == 200 || head.status == 206) taken = request.on_head(head);
      return taken.ok();
    };
    const auto on_data = [&](int status, std::string_view piece) {
      if (status == 200 || status == 206) return (taken = request.on_data(piece)).ok();
      rest += piece.substr(0, kMaxErrorBody - std::min(rest.size(), kMaxErrorBody));
      return rest.size() < kMaxErrorBody;
    };
    SPLICE_RETURN_IF_ERROR(client->Exchange(call, on_head, on_data).status());
    if (head.status == 200 || head.status == 206) return taken;
    if (!IsRedirect(head.status)) return ErrorOf(request, head, rest);
    SPLICE_ASSIGN_OR_RETURN(const HttpUrl next, ResolveLocation(request.url, head.Field("location")));
    if (request.url.https && !next.https)
      return Errorf(absl::StatusCode::kPermissionDenied, "{} leads from https:// to {}, which is not encrypted",
                    request.url.Origin(), next.Origin());
    request.url = next;
  }
  return Errorf(absl::StatusCode::kInternal, "{}: more than {} redirects", hub_.Origin(), kMaxRedirects);
}

absl::Status HubClient::ErrorOf(const Request& request, const HttpHead& head, const std::string& body) {
  const std::string code = head.Field("x-error-code"), page = options_.url + "/" + request.repository;
  const std::string say = options_.token.empty() ? "set HF_TOKEN, or give --token-file FILE, with a token"
                                                 : "the token that was sent must be one";
  const int status = head.status;
  if (code == "RepoNotFound" || (status == 404 && code.empty()))
    return Errorf(absl::StatusCode::kNotFound,
                  "{} does not exist, or it is private: check the name, or {} of an account that may read it", page,
                  say);
  if (code == "RevisionNotFound")
    return Errorf(absl::StatusCode::kNotFound, "{} has no such revision: write a branch, a tag or a commit behind @",
                  page);
  if (status == 404) return Errorf(absl::StatusCode::kNotFound, "{} is not there ({})", request.url.path, code);
  if (status == 401 || status == 403)
    return Errorf(absl::StatusCode::kPermissionDenied,
                  "{} is not open to everybody (HTTP {}): accept its licence on that page, and {} of the same account",
                  page, status, say);
  if (status == 416) return absl::OutOfRangeError("the file is not that long");
  const bool try_again = status == 408 || status == 429 || status >= 500;
  if (try_again)
    retry_after_ = std::min(kMaxRetryAfter, std::chrono::milliseconds(1000 * NumberOf(head.Field("retry-after"))));
  return Errorf(try_again ? absl::StatusCode::kUnavailable : absl::StatusCode::kInternal,
                "{} answered {} with HTTP {}: {}", request.url.Origin(),
                request.url.path.substr(0, request.url.path.find('?')), status, body.substr(0, 200));
}

absl::StatusOr<HubListing> HubClient::List(const ModelName& name) {
  Request request{.repository = name.repository, .url = hub_};
  request.url.path +=
      fmt::format("/api/models/{}/revision/{}?blobs=true", EncodedPath(name.repository), PercentEncode(name.revision));
  std::string text;
  request.on_head = [](const HttpHead&) { return absl::OkStatus(); };
  request.on_data = [&](std::string_view piece) {
    text += piece;
    return text.size() <= kMaxListing ? absl::OkStatus() : absl::InternalError("the list of files is too long");
  };
  SPLICE_RETURN_IF_ERROR(Send(request));
  return ParseListing(text, options_.url + "/" + name.repository);
}

absl::Status HubClient::Fetch(const std::string& repository, const std::string& commit, const std::string& file,
                              uint64_t offset, const FileSink& sink) {
  Request request{.repository = repository, .url = hub_, .offset = offset};
  request.url.path +=
      fmt::format("/{}/resolve/{}/{}", EncodedPath(repository), PercentEncode(commit), EncodedPath(file));
  request.on_head = [&](const HttpHead& head) -> absl::Status {
    FileHead told{.digest = request.digest};
    if (head.status == 206)
      std::tie(told.offset, told.size) = RangeOf(head.Field("content-range"));
    else
      told.size = NumberOf(head.Field("content-length"));
    if (told.offset != 0 && told.offset != offset)
      return Errorf(absl::StatusCode::kDataLoss, "{} sent bytes from {} on instead of {}", request.url.Origin(),
                    told.offset, offset);
    return sink.on_head(told);
  };
  request.on_data = sink.on_data;
  return Send(request);
}

bool HubClient::Pause(std::chrono::milliseconds time) {
  std::unique_lock lock(mutex_);
  cancel_.wait_for(lock, std::max(time, std::exchange(retry_after_, {})), [&] { return cancelled_; });
  return !cancelled_;
}

void HubClient::Cancel() {
  std::lock_guard lock(mutex_);
  cancelled_ = true;
  cancel_.notify_all();
  for (const auto& [origin, client] : clients_) client->Cancel();
}

}  // namespace spl::hub
