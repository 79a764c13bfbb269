#include "services/router/http/http_tls.h"

#include <utility>

#include "services/base/status.h"

namespace spl::router {

absl::StatusOr<std::shared_ptr<HttpTls>> HttpTls::Load(const CertificateFiles& files) {
  SPLICE_ASSIGN_OR_RETURN(Certificate certificate, ReadCertificateFiles(files));
  SPLICE_ASSIGN_OR_RETURN(auto context, MakeHttpsServerContext(files, certificate));
  return std::shared_ptr<HttpTls>(new HttpTls(files, std::move(certificate), std::move(context)));
}

std::shared_ptr<TlsContext> HttpTls::context() const {
  std::lock_guard lock(mutex_);
  return context_;
}

std::chrono::system_clock::time_point HttpTls::valid_until() const {
  std::lock_guard lock(mutex_);
  return certificate_.valid_until;
}

absl::StatusOr<bool> HttpTls::ReloadIfChanged() {
  absl::StatusOr<std::shared_ptr<HttpTls>> fresh = Load(files_);
  if (!fresh.ok()) {
    if (MessageOf(fresh.status()) == refused_) return false;
    refused_ = MessageOf(fresh.status());
    return fresh.status();
  }
  refused_.clear();
  std::lock_guard lock(mutex_);
  const Certificate& read = (*fresh)->certificate_;
  if (read.chain_pem == certificate_.chain_pem && read.key_pem == certificate_.key_pem) return false;
  certificate_ = std::move((*fresh)->certificate_);
  context_ = std::move((*fresh)->context_);
  return true;
}

}  // namespace spl::router
