#include "tests/support/hub_server.h"

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "services/hub/file_digest.h"

namespace spl::testing {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;
using hub::FileDigest;
using nlohmann::json;

FileDigest DigestOf(const std::string& text, FileDigest::Kind kind) {
  hub::FileHasher hasher(kind, text.size());
  hasher.Add(text);
  return hasher.Finish();
}

bool IsLfs(const std::string& name) { return name.ends_with(".safetensors") || name == "tokenizer.json"; }

}  // namespace

std::string Sha256Hex(const std::string& text) { return DigestOf(text, FileDigest::Kind::kSha256).hex; }

struct HubServer::Impl {
  struct Repository {
    std::string commit;
    std::map<std::string, std::string> files;
  };
  using Response = http::response<http::string_body>;

  asio::io_context io;
  tcp::acceptor acceptor{io, {asio::ip::address_v4::loopback(), 0}};
  mutable std::mutex mutex;  // guards the rest
  std::condition_variable released;
  bool is_released = false, stopping = false;
  std::map<std::string, Repository> repositories;
  std::map<std::string, std::string> blobs;  // by digest
  std::map<std::string, Rule> rules;
  std::string token, lfs_url;
  int fail_status = 0, fails = 0;
  bool hide_digests = false, hide_etags = false, ignore_ranges = false;
  std::vector<Request> requests;
  std::list<tcp::socket*> sockets;
  std::list<std::thread> threads;
  std::thread acceptor_thread;

  void Run() {
    while (true) {
      tcp::socket socket(io);
      beast::error_code error;
      acceptor.accept(socket, error);
      std::lock_guard lock(mutex);
      if (error || stopping) return;
      threads.emplace_back([this, moved = std::move(socket)]() mutable { Serve(std::move(moved)); });
    }
  }

  void Serve(tcp::socket socket) {
    std::list<tcp::socket*>::iterator mine;
    {
      std::lock_guard lock(mutex);
      mine = sockets.insert(sockets.end(), &socket);
      if (stopping) socket.close();
    }
    beast::flat_buffer buffer;
    beast::error_code error;
    for (bool open = true; open && !error;) {
      http::request<http::string_body> request;
      http::read(socket, buffer, request, error);
      if (error) break;
      std::string file;
      Response response = Answer(request, file);
      open = Send(socket, response, file) && request.keep_alive();
    }
    std::lock_guard lock(mutex);
    sockets.erase(mine);
    socket.close(error);
  }

  // Writes the answer by the file's rule. False: the connection ends.
  bool Send(tcp::socket& socket, Response& response, const std::string& file) {
    Rule rule;
    {
      std::lock_guard lock(mutex);
      if (const auto found = rules.find(file); found != rules.end() && response.result_int() / 100 == 2) {
        rule = found->second;
        if (rule.breaks > 0) --found->second.breaks;
        if (rule.corruptions > 0) --found->second.corruptions;
      }
    }
    std::string body = response.body();
    response.prepare_payload();
    if (rule.corruptions > 0 && !body.empty()) body[body.size() / 2] ^= 1;
    beast::error_code error;
    http::response_serializer<http::string_body> serializer{response};
    http::write_header(socket, serializer, error);
    const auto size = static_cast<int64_t>(body.size());
    const int64_t first = std::min(size, rule.breaks > 0        ? rule.break_after
                                         : rule.hold_after >= 0 ? rule.hold_after
                                                                : size);
    asio::write(socket, asio::buffer(body.data(), static_cast<size_t>(first)), error);
    if (rule.breaks > 0) return false;
    if (rule.hold_after >= 0) {
      std::unique_lock lock(mutex);
      released.wait(lock, [&] { return is_released || stopping; });
    }
    asio::write(socket, asio::buffer(body.data() + first, static_cast<size_t>(size - first)), error);
    return !error;
  }

  static Response Make(int status, const std::string& body = "", const std::string& error_code = "") {
    Response response{static_cast<http::status>(status), 11};
    response.body() = body;
    if (!error_code.empty()) response.set("X-Error-Code", error_code);
    return response;
  }

  static Response Redirect(int status, const std::string& to) {
    Response response = Make(status, "moved");
    response.set(http::field::location, to);
    return response;
  }

  Response Answer(const http::request<http::string_body>& request, std::string& file) {
    std::lock_guard lock(mutex);
    const std::string target(request.target());
    const std::string authorization(request[http::field::authorization]), range(request[http::field::range]);
    requests.push_back({target, authorization, range});
    if (fails > 0) {
      --fails;
      return Make(fail_status, "later");
    }
    if (target.starts_with("/lfs/")) {
      const auto found = blobs.find(target.substr(5));
      return found == blobs.end() ? Make(404) : Content(found->second, range, "\"cdn\"");
    }
    if (!token.empty() && authorization != "Bearer " + token)
      return Make(authorization.empty() ? 401 : 403, "restricted", "GatedRepo");
    for (const auto& [name, repository] : repositories) {
      if (target.starts_with("/api/models/" + name + "/revision/")) {
        const std::string revision = target.substr(name.size() + 22, target.find('?') - name.size() - 22);
        if (revision != "main" && revision != repository.commit) return Make(404, "", "RevisionNotFound");
        return List(repository, target.find("blobs=true") != target.npos);
      }
      if (!target.starts_with("/" + name + "/resolve/")) continue;
      const std::string rest = target.substr(name.size() + 10);
      file = rest.substr(rest.find('/') + 1);
      return File(repository, rest.substr(0, rest.find('/')), file, range);
    }
    return Make(401, "Repository not found", "RepoNotFound");
  }

  Response List(const Repository& repository, bool with_blobs) const {
    json root = {{"sha", repository.commit}, {"siblings", json::array()}};
    for (const auto& [name, content] : repository.files) {
      json entry = {{"rfilename", name}};
      if (with_blobs && !hide_digests) {
        entry["size"] = content.size();
        entry["blobId"] = DigestOf(content, FileDigest::Kind::kGitBlob).hex;
        if (IsLfs(name))
          entry["lfs"] = {{"sha256", Sha256Hex(content)}, {"size", content.size()}, {"pointerSize", 134}};
      }
      root["siblings"].push_back(entry);
    }
    return Make(200, root.dump());
  }

  Response File(const Repository& repository, const std::string& commit, const std::string& name,
                const std::string& range) const {
    const auto found = repository.files.find(name);
    if (commit != repository.commit) return Make(404, "", "RevisionNotFound");
    if (found == repository.files.end()) return Make(404, "", "EntryNotFound");
    const std::string digest =
        IsLfs(name) ? Sha256Hex(found->second) : DigestOf(found->second, FileDigest::Kind::kGitBlob).hex;
    if (IsLfs(name) && !lfs_url.empty()) {
      Response response = Redirect(302, lfs_url + "/lfs/" + digest);
      if (!hide_etags) response.set("X-Linked-ETag", "\"" + digest + "\"");
      return response;
    }
    return Content(found->second, range, hide_etags ? "" : "\"" + digest + "\"");
  }

  Response Content(const std::string& content, const std::string& range, const std::string& etag) const {
    const uint64_t from = range.starts_with("bytes=") && !ignore_ranges ? std::stoull(range.substr(6)) : 0;
    if (from > 0 && from >= content.size()) return Make(416);
    Response response = Make(from > 0 ? 206 : 200, content.substr(from));
    if (!etag.empty()) response.set(http::field::etag, etag);
    if (from > 0)
      response.set(http::field::content_range, "bytes " + std::to_string(from) + "-" +
                                                   std::to_string(content.size() - 1) + "/" +
                                                   std::to_string(content.size()));
    return response;
  }
};

HubServer::HubServer() : impl_(std::make_unique<Impl>()) {
  impl_->acceptor_thread = std::thread([impl = impl_.get()] { impl->Run(); });
}

HubServer::~HubServer() {
  {
    std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
    impl_->released.notify_all();
    for (tcp::socket* const socket : impl_->sockets) ::shutdown(socket->native_handle(), SHUT_RDWR);
  }
  ::shutdown(impl_->acceptor.native_handle(), SHUT_RDWR);
  impl_->acceptor_thread.join();
  for (std::thread& thread : impl_->threads) thread.join();
}

std::string HubServer::address() const {
  return "127.0.0.1:" + std::to_string(impl_->acceptor.local_endpoint().port());
}

void HubServer::Put(const std::string& repository, const std::map<std::string, std::string>& files) {
  std::string all;
  for (const auto& [name, content] : files) all += name + " " + Sha256Hex(content) + "\n";
  std::lock_guard lock(impl_->mutex);
  impl_->repositories[repository] = {DigestOf(all, FileDigest::Kind::kGitBlob).hex, files};
}

void HubServer::PutFolder(const std::string& repository, const std::string& dir) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(dir)) {
    std::ifstream in(entry.path(), std::ios::binary);
    files[entry.path().filename().string()] = std::string(std::istreambuf_iterator<char>(in), {});
  }
  Put(repository, files);
}

std::string HubServer::commit(const std::string& repository) const {
  std::lock_guard lock(impl_->mutex);
  return impl_->repositories.at(repository).commit;
}

void HubServer::SetRule(const std::string& file, const Rule& rule) {
  std::lock_guard lock(impl_->mutex);
  impl_->rules[file] = rule;
}

void HubServer::Release() {
  std::lock_guard lock(impl_->mutex);
  impl_->is_released = true;
  impl_->released.notify_all();
}

void HubServer::RequireToken(const std::string& token) {
  std::lock_guard lock(impl_->mutex);
  impl_->token = token;
}

void HubServer::FailNext(int status, int times) {
  std::lock_guard lock(impl_->mutex);
  impl_->fail_status = status;
  impl_->fails = times;
}

void HubServer::RedirectLfsTo(const std::string& url) {
  std::lock_guard lock(impl_->mutex);
  impl_->lfs_url = url;
}

void HubServer::AddBlob(const std::string& content) {
  std::lock_guard lock(impl_->mutex);
  impl_->blobs[Sha256Hex(content)] = content;
}

void HubServer::HideDigests(bool also_etags) {
  std::lock_guard lock(impl_->mutex);
  impl_->hide_digests = true;
  impl_->hide_etags = also_etags;
}

void HubServer::IgnoreRanges() {
  std::lock_guard lock(impl_->mutex);
  impl_->ignore_ranges = true;
}

std::vector<HubServer::Request> HubServer::requests() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->requests;
}

int HubServer::CountRequests(const std::string& part) const {
  const std::vector<Request> all = requests();
  return static_cast<int>(std::count_if(all.begin(), all.end(), [&](const Request& request) {
    return request.target.find(part) != request.target.npos;
  }));
}

}  // namespace spl::testing
