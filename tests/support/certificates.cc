#include "tests/support/certificates.h"

#include <gtest/gtest.h>
#include <openssl/ec.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>

#include <filesystem>
#include <fstream>

namespace spl::test {
namespace {

void AddExtension(X509* certificate, X509* issuer, int nid, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* const extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str());
  EXPECT_NE(extension, nullptr) << value;
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
}

X509* NewCertificate(EVP_PKEY* key, const std::string& common_name, std::chrono::hours from, std::chrono::hours until) {
  X509* const certificate = X509_new();
  X509_set_version(certificate, X509_VERSION_3);
  uint32_t serial = 0;
  RAND_bytes(reinterpret_cast<unsigned char*>(&serial), sizeof(serial));
  ASN1_INTEGER_set_uint64(X509_get_serialNumber(certificate), serial + uint64_t{1});
  X509_gmtime_adj(X509_getm_notBefore(certificate), std::chrono::seconds(from).count());
  X509_gmtime_adj(X509_getm_notAfter(certificate), std::chrono::seconds(until).count());
  X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate), "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(common_name.c_str()), -1, -1, 0);
  X509_set_pubkey(certificate, key);
  return certificate;
}

template <typename Write>
std::string ToPem(const Write& write) {
  BIO* const bio = BIO_new(BIO_s_mem());
  write(bio);
  char* text = nullptr;
  const long length = BIO_get_mem_data(bio, &text);
  std::string pem(text, static_cast<size_t>(length));
  BIO_free(bio);
  return pem;
}

std::string WriteFile(const std::string& path, const std::string& text) {
  std::ofstream(path + ".new") << text;
  std::filesystem::rename(path + ".new", path);
  return path;
}

}  // namespace

struct TestCa::Parts {
  EVP_PKEY* key = nullptr;
  X509* certificate = nullptr;
};

TestCa::TestCa(const std::string& name) : parts_(std::make_unique<Parts>()) {
  parts_->key = EVP_EC_gen("P-256");
  parts_->certificate = NewCertificate(parts_->key, name, std::chrono::hours(-48), std::chrono::hours(48));
  X509* const own = parts_->certificate;
  X509_set_issuer_name(own, X509_get_subject_name(own));
  AddExtension(own, own, NID_basic_constraints, "critical,CA:TRUE");
  AddExtension(own, own, NID_key_usage, "critical,keyCertSign");
  X509_sign(own, parts_->key, EVP_sha256());
  pem_ = ToPem([&](BIO* bio) { PEM_write_bio_X509(bio, own); });
}

TestCa::~TestCa() {
  X509_free(parts_->certificate);
  EVP_PKEY_free(parts_->key);
}

PemPair TestCa::Issue(const CertificateOptions& options) const {
  EVP_PKEY* const key = EVP_EC_gen("P-256");
  X509* const certificate = NewCertificate(key, "splice test", options.valid_from, options.valid_until);
  X509_set_issuer_name(certificate, X509_get_subject_name(parts_->certificate));
  AddExtension(certificate, parts_->certificate, NID_ext_key_usage, "serverAuth,clientAuth");
  std::string names;
  if (!options.dns.empty()) names = "DNS:" + options.dns;
  if (!options.ip.empty()) names += (names.empty() ? "IP:" : ",IP:") + options.ip;
  if (!names.empty()) AddExtension(certificate, parts_->certificate, NID_subject_alt_name, names);
  X509_sign(certificate, parts_->key, EVP_sha256());
  PemPair pair{ToPem([&](BIO* bio) { PEM_write_bio_X509(bio, certificate); }),
               ToPem([&](BIO* bio) { PEM_write_bio_PrivateKey(bio, key, nullptr, nullptr, 0, nullptr, nullptr); })};
  X509_free(certificate);
  EVP_PKEY_free(key);
  return pair;
}

PeerTlsOptions TestCa::IssueFiles(const std::string& dir, const std::string& name,
                                  const CertificateOptions& options) const {
  const PemPair pair = Issue(options);
  PeerTlsOptions files;
  files.key_file = WriteFile(dir + "/" + name + ".key", pair.key);
  files.cert_file = WriteFile(dir + "/" + name + ".crt", pair.certificate);
  files.ca_file = WriteFile(dir + "/" + name + ".ca", pem_);
  return files;
}

}  // namespace spl::test
