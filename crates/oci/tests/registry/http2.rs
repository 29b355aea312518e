//! HTTP/2, where the server offers it, and HTTP/1.1 elsewhere.

use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use bytes::Bytes;
use h2::Reason;
use quire_oci::blobs::{BlobSource, Whole};
use quire_oci::registry::{Proxies, RegistryError};
use tokio::sync::Barrier;

use super::http2_server::{Act, Asked, Close, Http2Server};
use super::secure::{Authority, fetch, secret};
use super::*;
use testing::fake::{Manner, Server, content, proxy, reply, wait_for};

const BOTH: &[&str] = &["h2", "http/1.1"];
const MANIFEST: &[u8] = br#"{"schemaVersion":2}"#;
/// Number of parallel requests.
const MANY: usize = 20;

/// A server with a certificate, and the settings with which clients accept it.
struct Stage {
    server: Http2Server,
    hosts: Hosts,
    _authority: Authority,
}

impl Stage {
    fn new(protocols: &[&str], act: impl Fn(&Asked) -> Act + Send + Sync + 'static) -> Self {
        let authority = Authority::new();
        let config = authority.config("127.0.0.1", false);
        let server = Http2Server::start(config, protocols, act);
        let hosts = hosts_of(&server.host(), &authority);
        Self { server, hosts, _authority: authority }
    }

    fn registry(&self, retries: u32) -> Registry {
        let settings = Settings { retries, ..self.hosts.settings() };
        registry(&self.server.host(), &settings)
    }

    /// Whether all requests used HTTP/2.
    fn is_http2(&self) -> bool {
        self.server.asked().iter().all(Asked::is_http2)
    }
}

fn hosts_of(host: &str, authority: &Authority) -> Hosts {
    let ca = authority.path("ca.crt");
    Hosts::new(host, &format!("server = \"https://{host}\"\nca = {ca:?}"))
}

/// Fetches as many parts of a blob at the same time, and returns their errors.
fn fetch_parts(there: &Registry, body: &Bytes) -> Vec<String> {
    let failed = |error: RegistryError| chain(&error);
    std::thread::scope(|scope| {
        let fetch = |number: usize| {
            let part = 1000 * number as u64..1000 * (number as u64 + 1);
            let got = there.range(&digest(body), part).map_err(failed)?;
            assert_same(&got, &body[1000 * number..1000 * (number + 1)]);
            Ok(())
        };
        let threads: Vec<_> = (0..MANY).map(|it| scope.spawn(move || fetch(it))).collect();
        threads.into_iter().filter_map(|it| it.join().unwrap().err()).collect()
    })
}

fn parts_body() -> Bytes {
    noise(1000 * MANY).into()
}

#[test]
fn parallel_requests_share_a_connection() {
    let body = parts_body();
    let (together, sent) = (Arc::new(Barrier::new(MANY)), body.clone());
    let stage = Stage::new(BOTH, move |asked| match asked.path.contains("/blobs/") {
        true => Act::SendTogether(Arc::clone(&together), sent.clone()),
        false => Act::Send(Bytes::from_static(MANIFEST)),
    });
    let there = stage.registry(0);
    there.manifest("a").unwrap();
    assert_eq!(fetch_parts(&there, &body), [""; 0]);
    assert!(stage.is_http2());
    assert_eq!((stage.server.connections(), stage.server.asked().len()), (1, MANY + 1));
}

/// Fetches a part of a blob, for a reader or to prefetch it.
fn fetch_part(there: &Registry, body: &Bytes, is_urgent: bool) {
    let (digest, size, part) = (digest(body), body.len() as u64, std::slice::from_ref(&(3..7)));
    let got = match is_urgent {
        true => BlobSource::ranges(there, &digest, size, part, Whole::Read),
        false => there.ranges_in_background(&digest, size, part, Whole::Read),
    };
    assert_same(&got.unwrap()[0], &body[3..7]);
}

/// A reader and a prefetch each find a connection that exists.
#[test]
fn connections_for_readers_and_prefetches_are_opened_ahead() {
    let body = parts_body();
    let sent = body.clone();
    let stage = Stage::new(BOTH, move |_| Act::Send(sent.clone()));
    let there = stage.registry(0);
    there.connect_ahead(&digest(&body), Duration::from_secs(60));
    wait_for("both requests", || stage.server.asked().len() == 2);
    for is_urgent in [false, true] {
        fetch_part(&there, &body, is_urgent);
    }
    let asked = stage.server.asked();
    let asked: Vec<_> = asked.iter().map(|it| (it.method.as_str(), it.connection)).collect();
    assert_eq!(asked, [("HEAD", 0), ("HEAD", 1), ("GET", 1), ("GET", 0)]);
}

/// Otherwise a reader would wait for the bytes that the server has already written for other requests.
#[test]
fn requests_without_readers_have_another_connection() {
    let body = parts_body();
    let sent = body.clone();
    let stage = Stage::new(BOTH, move |_| Act::Send(sent.clone()));
    let there = stage.registry(0);
    for is_urgent in [true, false, false, true] {
        fetch_part(&there, &body, is_urgent);
    }
    let connections: Vec<_> = stage.server.asked().iter().map(|it| it.connection).collect();
    assert_eq!(connections, [0, 1, 1, 0]);
    // HTTP/1.1 has a connection for each request that runs, so they share those that are idle.
    let kept = body.clone();
    let plain = Server::start(move |request, _| content(request, &kept));
    let there = registry(&plain.host(), &settings());
    for is_urgent in [true, false] {
        fetch_part(&there, &body, is_urgent);
    }
    assert!(plain.seen().iter().all(|it| it.connection == 0));
}

#[test]
fn servers_without_http2() {
    let act = |_: &Asked| Act::Send(Bytes::from_static(MANIFEST));
    for protocols in [&["http/1.1"][..], &[]] {
        let stage = Stage::new(protocols, act);
        stage.registry(0).manifest("a").unwrap();
        assert!(!stage.is_http2(), "{protocols:?}");
    }
    // Without TLS, HTTP/2 is not offered. The server would refuse its first line.
    let plain = Server::start(|_, _| reply(200).body(MANIFEST));
    assert_eq!(fetch(&plain.host(), &settings()), "good");
    assert_eq!(plain.lines(), ["GET /v2/app/manifests/a"]);
    // A header for the host would contradict the field of HTTP/2.
    let authority = Authority::new();
    let server = Http2Server::start(authority.config("127.0.0.1", false), BOTH, act);
    let ca = authority.path("ca.crt");
    let address = server.host();
    let text =
        format!("server = \"https://{address}\"\nca = {ca:?}\n[header]\nHost = \"other.test\"");
    let hosts = Hosts::new(&server.host(), &text);
    assert_eq!(fetch(&server.host(), &hosts.settings()), "good");
    let asked = server.asked().remove(0);
    assert_eq!((asked.is_http2(), asked.header("host")), (false, Some("other.test")));
}

#[test]
fn http2_through_a_proxy() {
    let authority = Authority::new();
    let config = authority.config("registry.test", false);
    let act = |_: &Asked| Act::Send(Bytes::from_static(MANIFEST));
    let server = Http2Server::start(config, BOTH, act);
    let hosts = Hosts::new("registry.test", &format!("ca = {:?}", authority.path("ca.crt")));
    for (manner, scheme) in [(Manner::Connect, "http"), (Manner::Socks5, "socks5h")] {
        let (address, _) = proxy(manner, server.address);
        let proxies =
            Proxies { all: secret(format!("{scheme}://{address}")), ..Proxies::default() };
        let settings = Settings { proxies, ..hosts.settings() };
        assert_eq!(fetch("registry.test", &settings), "good", "{scheme}");
    }
    assert!(server.asked().len() == 2 && server.asked().iter().all(Asked::is_http2));
}

#[test]
fn a_connection_that_ends_loses_no_request() {
    for close in [
        Close::Gracefully,
        Close::Abruptly(Reason::NO_ERROR),
        Close::Abruptly(Reason::ENHANCE_YOUR_CALM),
        Close::Silently,
    ] {
        let body = parts_body();
        let (sent, count) = (body.clone(), AtomicUsize::new(0));
        let stage = Stage::new(BOTH, move |asked| {
            if !asked.path.contains("/blobs/") {
                return Act::Send(Bytes::from_static(MANIFEST));
            }
            match (asked.connection, count.fetch_add(1, Ordering::SeqCst)) {
                (0, 5) => Act::Close(close, sent.clone()),
                _ => Act::Send(sent.clone()),
            }
        });
        let there = stage.registry(3);
        there.manifest("a").unwrap();
        assert_eq!(fetch_parts(&there, &body), [""; 0], "{close:?}");
        assert!(stage.is_http2(), "{close:?}");
        // All parts may have been requested before the client knew of the end.
        wait_for("a second connection", || {
            there.manifest("a").unwrap();
            stage.server.connections() > 1
        });
    }
}

/// The server has not begun such a request, so it is sent again without a pause and without a count of attempts.
#[test]
fn refused_streams_are_sent_again_at_once() {
    let body = parts_body();
    let (sent, count) = (body.clone(), AtomicUsize::new(0));
    let stage = Stage::new(BOTH, move |_| match count.fetch_add(1, Ordering::SeqCst) {
        0 => Act::Reset(Reason::REFUSED_STREAM),
        _ => Act::Send(sent.clone()),
    });
    let there = stage.registry(0);
    assert_same(&there.range(&digest(&body), 0..9).unwrap(), &body[..9]);
    assert!(stage.is_http2());
    assert_eq!(stage.server.asked().len(), 2);
    // A server that always refuses gets each attempt three times, and the error has the name of RFC 9113.
    let stage = Stage::new(BOTH, |_| Act::Reset(Reason::REFUSED_STREAM));
    let text = chain(&stage.registry(1).manifest("a").unwrap_err());
    let end = "(2 attempts): the connection was lost (the server reset the HTTP/2 stream: REFUSED_STREAM)";
    assert!(text.ends_with(end), "{text}");
    assert_eq!(stage.server.asked().len(), 6);
}

#[test]
fn a_stream_that_breaks_is_continued() {
    let body: Bytes = noise(100_000).into();
    for reason in [Reason::CANCEL, Reason::NO_ERROR] {
        let (sent, count) = (body.clone(), AtomicUsize::new(0));
        let stage = Stage::new(BOTH, move |_| match count.fetch_add(1, Ordering::SeqCst) {
            0 => Act::ResetHalfway(sent.clone(), reason),
            _ => Act::Send(sent.clone()),
        });
        let there = stage.registry(1);
        let size = body.len() as u64;
        assert_same(&read(there.blob(&digest(&body), Some(size), 0)).unwrap(), &body);
        let asked = stage.server.asked();
        assert!(stage.is_http2() && asked.len() == 2, "{asked:?}");
        assert_eq!(asked[1].header("range"), Some("bytes=50000-"), "{reason:?}");
    }
}

#[test]
fn bytes_that_end_early_are_an_error() {
    let body: Bytes = noise(100_000).into();
    let size = Some(body.len() as u64);
    // A reset without an error is the end of the response for hyper, and the header shows that bytes are missing.
    let sent = body.clone();
    let stage = Stage::new(BOTH, move |_| Act::ResetHalfway(sent.clone(), Reason::NO_ERROR));
    let there = stage.registry(0);
    let short = "the content ended after 50000 of 100000 bytes";
    let text = read(there.blob(&digest(&body), None, 0)).unwrap_err();
    assert!(text.ends_with(short), "{text}");
    let text = chain(&there.manifest("a").unwrap_err());
    assert!(text.ends_with(short), "{text}");
    let text = chain(&there.range(&digest(&body), 0..90_000).unwrap_err());
    assert!(text.ends_with("the content ended after 45000 of 90000 bytes"), "{text}");
    // A stream that ends normally.
    let sent = body.clone();
    let stage = Stage::new(BOTH, move |_| Act::EndHalfway(sent.clone()));
    for size in [None, size] {
        let text = read(stage.registry(0).blob(&digest(&body), size, 0)).unwrap_err();
        assert!(text.ends_with("the server violates HTTP/2: PROTOCOL_ERROR)"), "{text}");
    }
}

/// Servers close connections with many resets.
#[test]
fn a_response_that_was_read_is_not_reset() {
    let body: Bytes = noise(100_000).into();
    let sent = body.clone();
    let stage = Stage::new(BOTH, move |_| Act::SendEndLater(sent.clone()));
    let there = stage.registry(0);
    assert_same(&there.range(&digest(&body), 0..9).unwrap(), &body[..9]);
    let size = body.len() as u64;
    let part = there.blob(&digest(&body), Some(size), 5).until(70_000);
    assert_same(&read(part).unwrap(), &body[5..70_000]);
    wait_for("the ends", || stage.server.resets().len() == 2);
    assert_eq!(stage.server.resets(), [false; 2]);
}

/// curl does the same for the last of these codes.
#[test]
fn http1_is_used_where_http2_does_not_work() {
    for reason in [Reason::INTERNAL_ERROR, Reason::PROTOCOL_ERROR, Reason::HTTP_1_1_REQUIRED] {
        let stage = Stage::new(BOTH, move |asked| match asked.is_http2() {
            true => Act::Reset(reason),
            false => Act::Send(Bytes::from_static(MANIFEST)),
        });
        let there = stage.registry(1);
        there.manifest("a").unwrap();
        there.manifest("a").unwrap();
        let versions: Vec<_> = stage.server.asked().iter().map(Asked::is_http2).collect();
        assert_eq!(versions, [true, false, false], "{reason:?}");
        let text = chain(&stage.registry(0).manifest("a").unwrap_err());
        let end = format!("the server reset the HTTP/2 stream: {reason:?})");
        assert!(text.ends_with(&end), "{text}");
    }
}

/// A server that closes the connection instead of sending its first response, and one that sends nothing.
#[test]
fn http1_is_used_if_http2_brings_no_response() {
    for act in [Act::Close(Close::Silently, Bytes::new()), Act::Wait] {
        let stage = Stage::new(BOTH, move |asked| match asked.is_http2() {
            true => act.clone(),
            false => Act::Send(Bytes::from_static(MANIFEST)),
        });
        stage.registry(1).manifest("a").unwrap();
        let versions: Vec<_> = stage.server.asked().iter().map(Asked::is_http2).collect();
        assert_eq!(versions, [true, false]);
    }
}

/// With HTTP/2, headers of more than 64 KiB are refused. The limit of HTTP/1.1 is larger.
#[test]
fn headers_are_bounded() {
    for (length, versions) in [(60_000, &[true][..]), (70_000, &[true, false])] {
        let stage = Stage::new(BOTH, move |_| Act::Status(404, "x-filler", "x".repeat(length)));
        let error = stage.registry(1).manifest("a").unwrap_err();
        assert!(error.is_not_found(), "{}", chain(&error));
        let asked: Vec<_> = stage.server.asked().iter().map(Asked::is_http2).collect();
        assert_eq!(asked, versions, "{length}");
    }
}

/// The size of the windows, and the room for readers that are busy.
#[test]
fn responses_that_wait_for_their_readers_do_not_block_others() {
    const READERS: u64 = 12;
    let body: Bytes = noise(8 << 20).into();
    let sent = body.clone();
    let stage = Stage::new(BOTH, move |asked| match asked.path.contains("/blobs/") {
        true => Act::Send(sent.clone()),
        false => Act::Send(Bytes::from_static(MANIFEST)),
    });
    let there = stage.registry(0);
    there.manifest("a").unwrap();
    let readers = (0..READERS).map(|_| {
        let mut reader = there.blob(&digest(&body), Some(body.len() as u64), 0);
        reader.read_exact(&mut [0]).unwrap();
        reader
    });
    let readers: Vec<_> = readers.collect();
    wait_for("4 MiB for each", || stage.server.sent() >= READERS * (4 << 20));
    there.manifest("a").unwrap();
    for mut reader in readers {
        let mut rest = Vec::new();
        reader.read_to_end(&mut rest).unwrap();
        assert_same(&rest, &body[1..]);
    }
    assert!(stage.is_http2());
    assert_eq!(stage.server.connections(), 1);
}

/// Forwards connections to a server. Once `is_dead` is set, the first connection carries no bytes any more.
fn line_to(server: std::net::SocketAddr, is_dead: &Arc<AtomicBool>) -> String {
    fn copy(mut from: TcpStream, mut to: TcpStream, is_dead: &AtomicBool) {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(length @ 1..) = from.read(&mut bytes) {
            if !is_dead.load(Ordering::SeqCst) && to.write_all(&bytes[..length]).is_err() {
                return;
            }
        }
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let is_dead = Arc::clone(is_dead);
    std::thread::spawn(move || {
        for (number, client) in listener.incoming().enumerate() {
            let client = client.unwrap();
            let server = TcpStream::connect(server).unwrap();
            let ways =
                [(client.try_clone().unwrap(), server.try_clone().unwrap()), (server, client)];
            for (from, to) in ways {
                let never = Arc::new(AtomicBool::new(false));
                let is_dead = if number == 0 { Arc::clone(&is_dead) } else { never };
                std::thread::spawn(move || copy(from, to, &is_dead));
            }
        }
    });
    address.to_string()
}

/// A timeout of a request ends its stream, not the connection. The next attempt must not use that connection.
#[test]
fn a_dead_connection_is_not_used_again() {
    let authority = Authority::new();
    let config = authority.config("127.0.0.1", false);
    let server = Http2Server::start(config, BOTH, |_| Act::Send(Bytes::from_static(MANIFEST)));
    let is_dead = Arc::new(AtomicBool::new(false));
    let host = line_to(server.address, &is_dead);
    let hosts = hosts_of(&host, &authority);
    let settings = Settings { retries: 1, ..hosts.settings() };
    let there = registry(&host, &settings);
    there.manifest("a").unwrap();
    is_dead.store(true, Ordering::SeqCst);
    there.manifest("a").unwrap();
    assert!(server.asked().iter().all(Asked::is_http2));
    assert_eq!(server.connections(), 2);
}

/// TLS 1.3 servers refuse a client's certificate after the handshake. The HTTP/2 client loses this error, so the attempt
/// with HTTP/1.1 finds it, and is the last one.
#[test]
fn a_missing_certificate_is_an_error_of_tls() {
    let authority = Authority::new();
    let config = authority.config("127.0.0.1", true);
    let server = Http2Server::start(config, BOTH, |_| Act::Send(Bytes::from_static(MANIFEST)));
    let hosts = hosts_of(&server.host(), &authority);
    let text = fetch(&server.host(), &hosts.settings());
    assert!(text.contains("(2 attempts): the TLS handshake failed ("), "{text}");
    assert!(text.contains("CertificateRequired"), "{text}");
}

/// Small uploads use HTTP/2. The bodies of large ones do not, because servers take only a little of them at once.
#[test]
fn uploads() {
    for (length, is_http2) in [(100_000, true), (2 << 20, false)] {
        let stage = Stage::new(BOTH, |asked| match &*asked.method {
            "POST" => Act::Status(202, "location", "/v2/app/blobs/uploads/1".to_owned()),
            _ => Act::Status(201, "location", "/v2/app/blobs/x".to_owned()),
        });
        let body = noise(length);
        let there = stage.registry(0);
        there.upload_blob(&digest(&body), length as u64, &mut &body[..]).unwrap();
        let asked = stage.server.asked();
        let versions: Vec<_> = asked.iter().map(|it| (&*it.method, it.is_http2())).collect();
        assert_eq!(versions, [("POST", true), ("PUT", is_http2)]);
        assert_eq!(asked[1].header("content-length"), Some(&*length.to_string()));
        assert_eq!(stage.server.bodies().len(), 2);
        assert_same(&stage.server.bodies()[1], &body);
    }
}
