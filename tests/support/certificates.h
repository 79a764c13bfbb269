// Certificates for tests of TLS, made while they run.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "services/base/tls.h"

namespace spl::test {

struct CertificateOptions {
  std::string dns = "localhost", ip = "127.0.0.1";     // alternative names; empty: none of the kind
  std::chrono::hours valid_from{-1}, valid_until{24};  // from now
};

struct PemPair {
  std::string certificate, key;
};

// A CA with a P-256 key, valid from two days ago, so that it has been when an expired certificate was.
class TestCa {
 public:
  explicit TestCa(const std::string& name);
  ~TestCa();
  const std::string& pem() const { return pem_; }
  PemPair Issue(const CertificateOptions& options = {}) const;
  // Writes NAME.crt, NAME.key and NAME.ca (this CA) into `dir`; written again they replace those that were there, each
  // at once.
  PeerTlsOptions IssueFiles(const std::string& dir, const std::string& name,
                            const CertificateOptions& options = {}) const;

 private:
  struct Parts;
  const std::unique_ptr<Parts> parts_;
  std::string pem_;
};

}  // namespace spl::test
