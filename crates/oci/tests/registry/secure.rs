use std::io::Write as _;
use std::sync::Arc;

use quire_oci::registry::{Credential, Protection, Proxies, Secret};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::*;
use testing::fake::{Manner, Reply, Request, Server, proxy, reply};

/// A test CA, with the certificates that it has signed.
pub(super) struct Authority {
    folder: tempfile::TempDir,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    pub(super) fn new() -> Self {
        let mut parameters = CertificateParams::new(Vec::new()).unwrap();
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let folder = tempfile::tempdir().unwrap();
        // Each CA has a unique name.
        let name = folder.path().display().to_string();
        parameters.distinguished_name.push(DnType::CommonName, name);
        let issuer =
            CertifiedIssuer::self_signed(parameters, KeyPair::generate().unwrap()).unwrap();
        std::fs::write(folder.path().join("ca.crt"), issuer.pem()).unwrap();
        Self { folder, issuer }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Signs a certificate, and writes `NAME.cert` and `NAME.key`.
    pub(super) fn sign(&self, name: &str, host: &str) {
        let key = KeyPair::generate().unwrap();
        let parameters = CertificateParams::new(vec![host.to_owned()]).unwrap();
        let certificate = parameters.signed_by(&key, &self.issuer).unwrap();
        std::fs::write(self.path(&format!("{name}.cert")), certificate.pem()).unwrap();
        std::fs::write(self.path(&format!("{name}.key")), key.serialize_pem()).unwrap();
    }

    /// Starts a server for `host`, which may require client certificates.
    pub(super) fn server(&self, host: &str, wants_certificate: bool) -> Server {
        serve(self.config(host, wants_certificate), |_, _| reply(200).body("{}"))
    }

    /// Makes the configuration of such a server.
    pub(super) fn config(&self, host: &str, wants_certificate: bool) -> rustls::ServerConfig {
        self.sign("server", host);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = rustls::ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .unwrap();
        let chain = vec![CertificateDer::from_pem_file(self.path("server.cert")).unwrap()];
        let key = PrivateKeyDer::from_pem_file(self.path("server.key")).unwrap();
        let builder = if wants_certificate {
            let mut roots = rustls::RootCertStore::empty();
            roots.add(CertificateDer::from_pem_file(self.path("ca.crt")).unwrap()).unwrap();
            let verifier = rustls::server::WebPkiClientVerifier::builder_with_provider(
                Arc::new(roots),
                provider,
            );
            builder.with_client_cert_verifier(verifier.build().unwrap())
        } else {
            builder.with_no_client_auth()
        };
        builder.with_single_cert(chain, key).unwrap()
    }
}

/// Starts a server with TLS.
fn serve(
    config: rustls::ServerConfig,
    answer: impl Fn(&Request, usize) -> Reply + Send + Sync + 'static,
) -> Server {
    let config = Arc::new(config);
    Server::start_as(answer, move |job, stream| {
        let connection = rustls::ServerConnection::new(Arc::clone(&config)).unwrap();
        let stream = rustls::StreamOwned::new(connection, stream);
        job.serve(stream, |stream| stream.conn.peer_certificates().is_some());
    })
}

/// Fetches a manifest with these settings. Returns "good", or the error with its causes.
pub(super) fn fetch(host: &str, settings: &Settings) -> String {
    let reference: Reference = format!("{host}/app").parse().unwrap();
    let fetched = Registry::new(&reference, settings).and_then(|registry| registry.manifest("a"));
    fetched.map_or_else(|error| chain(&error).replace(host, "HOST"), |_| "good".to_owned())
}

#[test]
fn a_ca_of_ones_own() {
    let authority = Authority::new();
    let server = authority.server("127.0.0.1", false);
    let address = format!("server = \"https://{}\"", server.host());
    let check = |text: &str, expect: &str| {
        let hosts = Hosts::new(&server.host(), &format!("{address}\n{text}"));
        assert_eq!(fetch(&server.host(), &hosts.settings()), expect, "{text}");
    };
    let start = "cannot fetch manifest a of HOST/app at HOST: ";
    let unknown = "its certificate is signed by an unknown authority: put that CA's certificate into \
                   certs.d/HOST/ca.crt, below /etc/quire or the folder of your settings";
    check("", &format!("{start}{unknown}"));
    check(&format!("ca = {:?}", authority.path("ca.crt")), "good");
    check("skip_verify = true", "good");
    let missing = authority.path("none.crt");
    let start = format!("{start}cannot use the certificate file {}: ", missing.display());
    let hosts = Hosts::new(&server.host(), &format!("{address}\nca = {missing:?}"));
    let text = fetch(&server.host(), &hosts.settings());
    assert!(text.starts_with(&start), "{text}");
    // Docker's layout, which the error above recommends.
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join(server.host())).unwrap();
    std::fs::copy(authority.path("ca.crt"), folder.path().join(server.host()).join("ca.crt"))
        .unwrap();
    let settings = Settings { hosts: vec![folder.path().to_owned()], ..settings() };
    assert_eq!(fetch(&server.host(), &settings), "good");
}

#[test]
fn a_certificate_for_another_host() {
    let authority = Authority::new();
    let server = authority.server("other.test", false);
    let ca = authority.path("ca.crt");
    let hosts = Hosts::new(&server.host(), &format!("ca = {ca:?}"));
    let text = fetch(&server.host(), &hosts.settings());
    assert!(
        text.contains("the TLS handshake failed (") && text.contains("not valid for"),
        "{text}"
    );
}

#[test]
fn certificates_for_clients() {
    let authority = Authority::new();
    let server = authority.server("127.0.0.1", true);
    authority.sign("me", "me.test");
    let ca = format!("ca = {:?}\n", authority.path("ca.crt"));
    let pair =
        format!("client = [[{:?}, {:?}]]", authority.path("me.cert"), authority.path("me.key"));
    let hosts = Hosts::new(&server.host(), &format!("{ca}{pair}"));
    assert_eq!(fetch(&server.host(), &hosts.settings()), "good");
    assert!(server.seen()[0].has_certificate);
    let both = std::fs::read_to_string(authority.path("me.key")).unwrap()
        + &std::fs::read_to_string(authority.path("me.cert")).unwrap();
    let hosts = Hosts::new(&server.host(), &format!("{ca}client = \"me.pem\""));
    std::fs::write(hosts.path(&server.host()).join("me.pem"), both).unwrap();
    assert_eq!(fetch(&server.host(), &hosts.settings()), "good");
    let hosts = Hosts::new(&server.host(), &ca);
    assert_ne!(fetch(&server.host(), &hosts.settings()), "good");
    assert_eq!(server.seen().len(), 2);
}

#[test]
fn plain_http_where_tls_is_expected_and_the_reverse() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let host = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            assert!(stream.read(&mut [0; 2000]).unwrap() > 0);
            stream.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n").unwrap();
        }
    });
    let hosts = Hosts::new(&host, &format!("server = \"https://{host}\""));
    let text = fetch(&host, &hosts.settings());
    assert!(
        text.ends_with(
            "the server speaks HTTP, not HTTPS: use --plain-http if the network is trusted"
        ),
        "{text}"
    );
    // The response of Go's HTTPS servers to HTTP requests.
    let go =
        Server::start(|_, _| reply(400).body("Client sent an HTTP request to an HTTPS server.\n"));
    let text = fetch(&go.host(), &settings());
    assert!(text.contains("the server speaks HTTPS, not HTTP"), "{text}");
}

#[test]
fn tls_is_not_given_up_on_the_way() {
    let authority = Authority::new();
    let plain = Server::start(|_, _| reply(200).body("{}"));
    authority.sign("server", "127.0.0.1");
    let (chain, key) = (authority.path("server.cert"), authority.path("server.key"));
    for leads in ["location", "www-authenticate"] {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![CertificateDer::from_pem_file(&chain).unwrap()],
                PrivateKeyDer::from_pem_file(&key).unwrap(),
            )
            .unwrap();
        let target = format!("http://{}/x", plain.host());
        let server = serve(config, move |_, _| match leads {
            "location" => reply(307).header(leads, &target),
            _ => reply(401).header(leads, &format!("Bearer realm=\"{target}\"")),
        });
        let ca = format!("ca = {:?}", authority.path("ca.crt"));
        let hosts = Hosts::new(&server.host(), &ca);
        let text = fetch(&server.host(), &hosts.settings());
        assert!(text.ends_with(&format!("it redirects to {} without TLS", plain.host())), "{text}");
    }
    assert_eq!(plain.seen().len(), 0);
}

pub(super) fn secret(address: impl std::fmt::Display) -> Option<Secret> {
    Some(Secret::new(address.to_string()))
}

/// The first request by HTTP, after HTTPS has failed, has no credentials. A mirror is never asked by HTTP instead.
#[test]
fn unverified_registries_may_use_http() {
    let plain = Server::start(|request, _| match request.header("authorization") {
        None => reply(401).header("WWW-Authenticate", "Basic realm=\"x\""),
        Some(_) => reply(200).body("{}"),
    });
    let mirror = Server::start(|_, _| reply(200).body("{}"));
    let hosts = Hosts::new(&plain.host(), &format!("[host.\"https://{}\"]", mirror.host()));
    let mut with = Settings { protection: Protection::Unverified, retries: 0, ..hosts.settings() };
    with.keyring.given =
        Some(Credential::Password { user: "u".to_owned(), password: Secret::new("p".to_owned()) });
    assert_eq!(fetch(&plain.host(), &with), "good");
    let seen = plain.seen();
    assert_eq!(seen[0].line(), "GET /v2/");
    assert_eq!(seen[0].header("authorization"), None);
    assert_eq!(mirror.seen().len(), 0);
    for protection in [Protection::Usual, Protection::Verified] {
        let with = Settings { protection, ..with.clone() };
        let https = Hosts::new(&plain.host(), &format!("server = \"https://{}\"", plain.host()));
        let text = fetch(&plain.host(), &Settings { hosts: https.settings().hosts, ..with });
        assert_ne!(text, "good", "{protection:?}");
    }
    assert_eq!(plain.seen().len(), seen.len());
}

#[test]
fn a_redirect_to_http_does_not_turn_an_unverified_registry_to_http() {
    let authority = Authority::new();
    let plain = Server::start(|_, _| reply(200).body("{}"));
    let leads = |_: &Request, _: usize| reply(307).header("location", "http://registry.test/x");
    let server = serve(authority.config("other.test", false), leads);
    let (address, _asked) = proxy(Manner::Connect, server.address);
    let https = secret(format!("http://{address}"));
    let http = secret(format!("http://{}", plain.host()));
    let proxies = Proxies { https, http, ..Proxies::default() };
    let with = Settings { protection: Protection::Unverified, proxies, retries: 0, ..settings() };
    let text = fetch("registry.test", &with);
    assert!(text.ends_with("it redirects to HOST without TLS"), "{text}");
    assert_eq!(plain.seen().len(), 0);
}

#[test]
fn proxies_for_http() {
    // Requests to a proxy for HTTP contain the whole address.
    let server = Server::start(|_, _| reply(200).body("{}"));
    let proxies =
        Proxies { http: secret(format!("http://u:p@{}", server.host())), ..Proxies::default() };
    let with = Settings { proxies, protection: Protection::None, retries: 0, ..settings() };
    assert_eq!(fetch("registry.test", &with), "good");
    assert_eq!(server.lines(), ["GET http://registry.test/v2/app/manifests/a"]);
    // `printf u:p | base64`
    assert_eq!(server.seen()[0].header("proxy-authorization"), Some("Basic dTpw"));
    assert_eq!(server.seen()[0].header("authorization"), None);
    let mut except = with.clone();
    except.proxies.except = "example.com,.test".to_owned();
    let text = fetch("registry.test", &except);
    assert!(text.contains("the host name cannot be resolved"), "{text}");
    // Loopback is reached without the proxy.
    let own = Server::start(|_, _| reply(200).body("{}"));
    assert_eq!(fetch(&own.host(), &with), "good");
    assert_eq!((server.seen().len(), own.seen().len()), (1, 1));
}

#[test]
fn proxies_for_https_and_socks() {
    let authority = Authority::new();
    let server = authority.server("registry.test", false);
    let hosts = Hosts::new("registry.test", &format!("ca = {:?}", authority.path("ca.crt")));
    for (manner, scheme, expect) in [
        (Manner::Connect, "http", "CONNECT registry.test:443"),
        (Manner::Socks5, "socks5h", "registry.test:443"),
    ] {
        let (address, asked) = proxy(manner, server.address);
        let proxies =
            Proxies { all: secret(format!("{scheme}://{address}")), ..Proxies::default() };
        assert_eq!(
            fetch("registry.test", &Settings { proxies, ..hosts.settings() }),
            "good",
            "{scheme}"
        );
        assert_eq!(*asked.lock().unwrap(), [expect]);
    }
    assert_eq!(server.seen().len(), 2);
    let proxies = Proxies { https: secret("http://:x@:"), ..Proxies::default() };
    let text = fetch("registry.test", &Settings { proxies, ..hosts.settings() });
    assert!(text.ends_with("cannot use the proxy in HTTPS_PROXY"), "{text}");
}
