//! Connection settings from `hosts.toml` and the environment.

use std::net::TcpListener;

use quire_oci::registry::Proxies;

use super::secure::{Authority, fetch, secret};
use super::*;
use testing::fake::{Manner, Server, proxy, reply};

#[test]
fn a_server_gets_the_certificate_that_it_can_use() {
    let (authority, other) = (Authority::new(), Authority::new());
    let server = authority.server("127.0.0.1", true);
    authority.sign("me", "me.test");
    other.sign("me", "me.test");
    let pair = |of: &Authority| format!("[{:?}, {:?}]", of.path("me.cert"), of.path("me.key"));
    let ca = format!("ca = {:?}\n", authority.path("ca.crt"));
    let with = |pairs: &[String]| {
        let hosts = Hosts::new(&server.host(), &format!("{ca}client = [{}]", pairs.join(", ")));
        fetch(&server.host(), &hosts.settings())
    };
    let (good, bad) = (pair(&authority), pair(&other));
    assert_eq!(with(&[bad.clone(), good.clone()]), "good");
    assert_eq!(with(&[good, bad.clone()]), "good");
    assert_ne!(with(&[bad.clone(), bad]), "good");
    assert!(server.seen().iter().all(|it| it.has_certificate));
    assert_eq!(server.seen().len(), 2);
    // A key that does not belong to the certificate is detected before any request.
    let mixed = format!("[{:?}, {:?}]", authority.path("me.cert"), other.path("me.key"));
    let text = with(&[mixed]);
    assert!(text.contains("cannot use the certificate file"), "{text}");
}

#[test]
fn tls_goes_through_proxies_but_for_exceptions() {
    let authority = Authority::new();
    let server = authority.server("registry.test", false);
    let ca = format!("ca = {:?}", authority.path("ca.crt"));
    let hosts = Hosts::new("registry.test", &ca);
    for (manner, scheme) in [(Manner::Connect, "http"), (Manner::Socks5, "socks5h")] {
        let (address, asked) = proxy(manner, server.address);
        let https = secret(format!("{scheme}://{address}"));
        let proxies = Proxies { https, ..Proxies::default() };
        let with = |except: &str| {
            let proxies = Proxies { except: except.to_owned(), ..proxies.clone() };
            fetch("registry.test", &Settings { proxies, retries: 0, ..hosts.settings() })
        };
        assert_eq!(with(""), "good");
        assert_eq!(with("other.test,test.example"), "good");
        for except in ["registry.test", ".test", "a.io, test", "*"] {
            let text = with(except);
            assert!(text.contains("the host name cannot be resolved"), "{except}: {text}");
        }
        assert_eq!(asked.lock().unwrap().len(), 2, "{scheme}");
    }
    // A proxy for HTTP is not used for HTTPS.
    let (address, asked) = proxy(Manner::Connect, server.address);
    let proxies = Proxies { http: secret(format!("http://{address}")), ..Proxies::default() };
    let settings = Settings { proxies, retries: 0, ..hosts.settings() };
    assert!(fetch("registry.test", &settings).contains("the host name cannot be resolved"));
    assert!(asked.lock().unwrap().is_empty());
}

#[test]
fn hosts_have_proxies_of_their_own() {
    let authority = Authority::new();
    let server = authority.server("localhost", false);
    let port = server.address.port();
    let (connect, connected) = proxy(Manner::Connect, server.address);
    let (socks, socked) = proxy(Manner::Socks5, server.address);
    let (environment, unused) = proxy(Manner::Connect, server.address);
    let ca = format!("ca = {:?}\n", authority.path("ca.crt"));
    let https = secret(format!("http://{environment}"));
    // The file overrides the environment, including the exceptions for proxies. Loopback is usually such an exception.
    let proxies = Proxies { https, except: "*".to_owned(), ..Proxies::default() };
    let host = format!("localhost:{port}");
    for address in
        [format!("http://{connect}"), format!("socks5h://{socks}"), format!("socks5://{socks}")]
    {
        let hosts = Hosts::new(&host, &format!("{ca}proxy = \"{address}\""));
        let settings = Settings { proxies: proxies.clone(), ..hosts.settings() };
        assert_eq!(fetch(&host, &settings), "good", "{address}");
    }
    assert_eq!(*connected.lock().unwrap(), [format!("CONNECT {host}")]);
    // With socks5 the client resolves the name and sends an address; with socks5h it sends the name.
    assert_eq!(*socked.lock().unwrap(), [host, format!("127.0.0.1:{port}")]);
    assert!(unused.lock().unwrap().is_empty());
}

#[test]
fn a_proxy_that_refuses_is_named() {
    let refusing = Server::start(|_, _| reply(403).header("connection", "close"));
    let proxies = Proxies {
        https: secret(format!("http://u:secret@{}", refusing.host())),
        ..Proxies::default()
    };
    let settings = Settings { proxies, retries: 0, ..settings() };
    let text = fetch("registry.test", &settings);
    assert!(text.contains("proxy") && !text.contains("secret"), "{text}");
    assert_eq!(refusing.lines(), ["CONNECT registry.test:443"]);
}

#[test]
fn nobody_waits_longer_for_a_connection_than_is_said() {
    // Once its queue is full, the listener accepts no connections, because the kernel drops the packets.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let _full: Vec<_> = (0..3)
        .map(|_| std::net::TcpStream::connect_timeout(&address, Duration::from_millis(100)))
        .collect();
    let own = Server::start(|_, _| reply(200).body("{}"));
    let text = format!("[host.\"http://{address}\"]\ndial_timeout = \"200ms\"");
    let hosts = Hosts::new(&own.host(), &text);
    let settings = Settings { stall: Duration::from_secs(20), ..hosts.settings() };
    assert_eq!(fetch(&own.host(), &settings), "good");
    let text = format!("server = \"http://{address}\"\ndial_timeout = \"200ms\"");
    let hosts = Hosts::new(&address.to_string(), &text);
    let settings = Settings { stall: Duration::from_secs(20), retries: 0, ..hosts.settings() };
    let told = fetch(&address.to_string(), &settings);
    assert!(told.contains("timed out after 0.2 s"), "{told}");
}
