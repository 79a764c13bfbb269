#include "tests/support/kubernetes_api.h"

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <boost/beast/ssl.hpp>
#include <condition_variable>
#include <deque>
#include <fstream>
#include <list>
#include <thread>
#include <utility>

namespace spl::testing {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using tcp = asio::ip::tcp;
using nlohmann::json;

struct Certificate {
  std::string certificate_pem, key_pem;
};

// Signs itself, for 127.0.0.1: CA and server in one.
Certificate MakeCertificate() {
  EVP_PKEY* const key = EVP_EC_gen("P-256");
  X509* const x509 = X509_new();
  X509_set_version(x509, 2);
  ASN1_INTEGER_set(X509_get_serialNumber(x509), 1);
  X509_gmtime_adj(X509_getm_notBefore(x509), -3600);
  X509_gmtime_adj(X509_getm_notAfter(x509), 86400);
  X509_set_pubkey(x509, key);
  X509_NAME* const name = X509_get_subject_name(x509);
  X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, reinterpret_cast<const unsigned char*>("test"), -1, -1, 0);
  X509_set_issuer_name(x509, name);
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, x509, x509, nullptr, nullptr, 0);
  for (const auto& [nid, value] : std::map<int, const char*>{{NID_basic_constraints, "critical,CA:TRUE"},
                                                             {NID_subject_alt_name, "IP:127.0.0.1"}}) {
    X509_EXTENSION* const extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value);
    X509_add_ext(x509, extension, -1);
    X509_EXTENSION_free(extension);
  }
  X509_sign(x509, key, EVP_sha256());
  const auto to_string = [](auto write) {
    BIO* const bio = BIO_new(BIO_s_mem());
    write(bio);
    char* data = nullptr;
    const long size = BIO_get_mem_data(bio, &data);
    std::string text(data, static_cast<size_t>(size));
    BIO_free(bio);
    return text;
  };
  Certificate made;
  made.certificate_pem = to_string([&](BIO* bio) { PEM_write_bio_X509(bio, x509); });
  made.key_pem =
      to_string([&](BIO* bio) { PEM_write_bio_PrivateKey(bio, key, nullptr, nullptr, 0, nullptr, nullptr); });
  X509_free(x509);
  EVP_PKEY_free(key);
  return made;
}

}  // namespace

struct KubernetesApi::Impl {
  using Stream = beast::ssl_stream<tcp::socket>;

  asio::io_context io;
  asio::ssl::context tls{asio::ssl::context::tls_server};
  tcp::acceptor acceptor{io, {asio::ip::address_v4::loopback(), 0}};
  std::string dir;
  mutable std::mutex mutex;  // guards the rest
  std::condition_variable changed;
  std::map<std::string, json> slices;
  std::deque<std::pair<int64_t, json>> history;  // events by their version
  int64_t version = 100;
  int64_t oldest = 0;  // versions up to this one are forgotten
  int64_t cut = 0;     // watches from before it end
  std::string token;
  Counters counters;
  bool stopping = false;
  std::list<std::thread> threads;
  std::list<tcp::socket*> sockets;
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
    Stream stream(std::move(socket), tls);
    std::list<tcp::socket*>::iterator mine;
    {
      std::lock_guard lock(mutex);
      mine = sockets.insert(sockets.end(), &stream.next_layer());
      if (stopping) stream.next_layer().close();
    }
    beast::error_code error;
    stream.handshake(asio::ssl::stream_base::server, error);
    beast::flat_buffer buffer;
    http::request<http::string_body> request;
    if (!error) http::read(stream, buffer, request, error);
    if (!error) Answer(stream, request);
    std::lock_guard lock(mutex);
    sockets.erase(mine);
    stream.next_layer().close(error);
  }

  static std::string Parameter(const std::string& target, const std::string& name) {
    const size_t at = target.find("&" + name + "=");
    if (at == std::string::npos) return "";
    const size_t begin = at + name.size() + 2;
    return target.substr(begin, target.find('&', begin) - begin);
  }

  static bool Wanted(const json& slice, const std::string& target) {
    // labelSelector=kubernetes.io/service-name in (A,B), escaped
    const std::string service = slice["metadata"]["labels"]["kubernetes.io/service-name"];
    return target.find("%28" + service + "%2C") != std::string::npos ||
           target.find("%2C" + service + "%29") != std::string::npos;
  }

  static void Reply(Stream& stream, http::status status, const json& body) {
    http::response<http::string_body> response{status, 11};
    response.body() = body.dump();
    response.prepare_payload();
    beast::error_code ignored;
    http::write(stream, response, ignored);
  }

  void Answer(Stream& stream, const http::request<http::string_body>& request) {
    const std::string target(request.target());
    std::unique_lock lock(mutex);
    counters.last_target = target;
    if (request[http::field::authorization] != "Bearer " + token) {
      ++counters.refused;
      return Reply(stream, http::status::unauthorized, {{"kind", "Status"}, {"code", 401}});
    }
    if (target.find("watch=1") == std::string::npos) {
      ++counters.lists;
      // Pages of one, so that reading on is tried.
      const std::string after = Parameter(target, "continue");
      json list = {{"kind", "EndpointSliceList"}, {"items", json::array()}};
      list["metadata"]["resourceVersion"] = std::to_string(version);
      auto next = after.empty() ? slices.begin() : slices.upper_bound(after);
      while (next != slices.end() && !Wanted(next->second, target)) ++next;
      if (next != slices.end()) {
        list["items"].push_back(next->second);
        if (std::next(next) != slices.end()) list["metadata"]["continue"] = next->first;
      }
      return Reply(stream, http::status::ok, list);
    }
    ++counters.watches;
    int64_t seen = std::atoll(Parameter(target, "resourceVersion").c_str());
    const int64_t my_cut = cut;
    http::response<http::empty_body> head{http::status::ok, 11};
    head.chunked(true);
    http::response_serializer<http::empty_body> serializer{head};
    beast::error_code error;
    http::write_header(stream, serializer, error);
    const auto send = [&](const json& event) {
      const std::string line = event.dump() + "\n";
      // In two pieces: a line may arrive in several.
      asio::write(stream, http::make_chunk(asio::buffer(line.data(), line.size() / 2)), error);
      asio::write(stream, http::make_chunk(asio::buffer(line.data() + line.size() / 2, line.size() - line.size() / 2)),
                  error);
    };
    if (seen < oldest) {
      ++counters.gone;
      send({{"type", "ERROR"}, {"object", {{"kind", "Status"}, {"code", 410}, {"reason", "Expired"}}}});
      asio::write(stream, http::make_chunk_last(), error);
      return;
    }
    send({{"type", "BOOKMARK"}, {"object", {{"metadata", {{"resourceVersion", std::to_string(seen)}}}}}});
    while (!error && !stopping && cut == my_cut) {
      for (const auto& [at, event] : history) {
        if (at > seen && Wanted(event["object"], target)) send(event);
      }
      seen = version;
      changed.wait(lock, [&] { return stopping || cut != my_cut || version > seen; });
    }
  }

  void Add(const char* type, json slice) {
    std::lock_guard lock(mutex);
    ++version;
    slice["metadata"]["resourceVersion"] = std::to_string(version);
    const std::string name = slice["metadata"]["name"];
    history.emplace_back(version, json{{"type", type}, {"object", slice}});
    if (std::string(type) == "DELETED")
      slices.erase(name);
    else
      slices[name] = std::move(slice);
    changed.notify_all();
  }
};

KubernetesApi::KubernetesApi(const std::string& dir) : impl_(std::make_unique<Impl>()) {
  impl_->dir = dir;
  const Certificate certificate = MakeCertificate();
  std::ofstream(dir + "/ca.crt") << certificate.certificate_pem;
  SetToken("first-token");
  impl_->tls.use_certificate_chain(asio::buffer(certificate.certificate_pem));
  impl_->tls.use_private_key(asio::buffer(certificate.key_pem), asio::ssl::context::pem);
  impl_->acceptor_thread = std::thread([impl = impl_.get()] { impl->Run(); });
}

KubernetesApi::~KubernetesApi() {
  {
    std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
    impl_->changed.notify_all();
    for (tcp::socket* const socket : impl_->sockets) ::shutdown(socket->native_handle(), SHUT_RDWR);
  }
  ::shutdown(impl_->acceptor.native_handle(), SHUT_RDWR);
  impl_->acceptor_thread.join();
  for (std::thread& thread : impl_->threads) thread.join();
}

std::string KubernetesApi::address() const {
  return "127.0.0.1:" + std::to_string(impl_->acceptor.local_endpoint().port());
}

void KubernetesApi::Put(json slice) {
  bool known;
  {
    std::lock_guard lock(impl_->mutex);
    known = impl_->slices.contains(slice["metadata"]["name"]);
  }
  impl_->Add(known ? "MODIFIED" : "ADDED", std::move(slice));
}

void KubernetesApi::Remove(const std::string& name) {
  json slice;
  {
    std::lock_guard lock(impl_->mutex);
    slice = impl_->slices.at(name);
  }
  impl_->Add("DELETED", std::move(slice));
}

void KubernetesApi::ForgetHistory() {
  std::lock_guard lock(impl_->mutex);
  impl_->oldest = impl_->version;
  impl_->history.clear();
}

void KubernetesApi::CutWatches() {
  std::lock_guard lock(impl_->mutex);
  ++impl_->cut;
  impl_->changed.notify_all();
}

void KubernetesApi::SetToken(const std::string& token) {
  std::lock_guard lock(impl_->mutex);
  impl_->token = token;
  std::ofstream(impl_->dir + "/token") << token << "\n";
}

KubernetesApi::Counters KubernetesApi::counters() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->counters;
}

}  // namespace spl::testing
