use std::sync::atomic::Ordering;
use std::time::Instant;

use quire_oci::blobs::{BlobSource, Whole};

use super::*;
use testing::fake::{Reply, Request, Server, content, reply, wait_for};

/// Reads a blob of 600,000 bytes from a server with the given responses. Returns the result, and the server.
fn check(
    answers: impl Fn(&Request, usize, &[u8]) -> Reply + Send + Sync + 'static,
) -> (Result<(), String>, Server) {
    let bytes = noise(600_000);
    let blob = bytes.clone();
    let server = Server::start(move |request, number| answers(request, number, &blob));
    let reader = registry(&server.host(), &settings()).blob(&digest(&bytes), Some(600_000), 0);
    let result = read(reader).map(|got| assert_same(&got, &bytes));
    let result = result.map_err(|text| {
        text.replace(&server.host(), "HOST").replace(&digest(&bytes).to_string(), "DIGEST")
    });
    (result, server)
}

fn ranges(server: &Server) -> Vec<String> {
    server.seen().iter().map(|request| request.header("range").unwrap_or("-").to_owned()).collect()
}

#[test]
fn a_broken_connection_is_mended() {
    let (result, server) = check(|request, number, blob| match number {
        0 => content(request, blob).cut(100_000),
        1 => content(request, blob).cut(300_000),
        _ => content(request, blob),
    });
    assert_eq!(result, Ok(()));
    assert_eq!(ranges(&server), ["-", "bytes=100000-", "bytes=400000-"]);
}

#[test]
fn a_blob_from_the_middle() {
    let bytes = noise(5000);
    let blob = bytes.clone();
    let server = Server::start(move |request, _| content(request, &blob));
    let registry = registry(&server.host(), &settings());
    assert_same(&read(registry.blob(&digest(&bytes), Some(5000), 4000)).unwrap(), &bytes[4000..]);
    assert_same(&read(registry.blob(&digest(&bytes), None, 0)).unwrap(), &bytes);
    // A range that is empty, and a reader that is never read, cause no requests.
    assert_same(&read(registry.blob(&digest(&bytes), Some(5000), 5000)).unwrap(), &[]);
    drop(registry.blob(&digest(&bytes), Some(5000), 0));
    assert_eq!(ranges(&server), ["bytes=4000-", "-"]);
}

#[test]
fn a_server_without_ranges_is_read_from_the_start() {
    let (result, server) = check(|_, number, blob| match number {
        0 => reply(200).body(blob).cut(100_000),
        _ => reply(200).body(blob),
    });
    assert_eq!(result, Ok(()));
    assert_eq!(ranges(&server), ["-", "bytes=100000-"]);
}

#[test]
fn a_short_body_is_completed() {
    // Without a `Content-Length`, the end of the body cannot be distinguished from a broken connection.
    let (result, server) = check(|request, number, blob| match number {
        0 => reply(200).header("connection", "close").body(&blob[..200_000]),
        _ => content(request, blob),
    });
    assert_eq!(result, Ok(()));
    assert_eq!(ranges(&server), ["-", "bytes=200000-"]);
}

#[test]
fn busy_servers_are_asked_again() {
    let (result, server) = check(|request, number, blob| match number {
        0 => reply(503),
        1 => reply(500),
        2 => reply(429),
        _ => content(request, blob),
    });
    assert_eq!(result, Ok(()));
    assert_eq!(server.seen().len(), 4);
}

#[test]
fn servers_say_when_to_come_back() {
    for (after, date) in
        [("2", None), ("Sun, 06 Nov 1994 08:49:39 GMT", Some("Sun, 06 Nov 1994 08:49:37 GMT"))]
    {
        let start = Instant::now();
        let (result, _) = check(move |request, number, blob| match number {
            0 => match date {
                None => reply(429).header("retry-after", after),
                Some(date) => reply(429).header("retry-after", after).header("date", date),
            },
            _ => content(request, blob),
        });
        assert_eq!(result, Ok(()));
        assert!(start.elapsed() >= Duration::from_secs(2), "{:?}", start.elapsed());
    }
    // A wait of a day is too long, so the request fails.
    let (result, server) = check(|_, _, _| reply(429).header("retry-after", "86400"));
    assert_eq!(
        result.unwrap_err(),
        "cannot fetch blob DIGEST of HOST/app at HOST: the registry limits the rate of requests: try again in 86400 s"
    );
    assert_eq!(server.seen().len(), 1);
}

#[test]
fn a_stalled_connection_is_given_up() {
    let (result, server) = check(|request, number, blob| match number {
        0 => content(request, blob).stall(70_000),
        1 => reply(200).delay(Duration::from_secs(15)),
        _ => content(request, blob),
    });
    assert_eq!(result, Ok(()));
    assert_eq!(ranges(&server), ["-", "bytes=70000-", "bytes=70000-"]);
}

#[test]
fn attempts_are_bounded() {
    let (result, server) = check(|_, _, _| {
        reply(503)
            .body(r#"{"errors":[{"code":"UNAVAILABLE","message":"come back\u001b[2J later"}]}"#)
    });
    assert_eq!(
        result.unwrap_err(),
        "cannot fetch blob DIGEST of HOST/app at HOST (4 attempts): the server returned status \
         503 (the server says: \"come back\\u{1b}[2J later\")"
    );
    assert_eq!(server.seen().len(), 4);
    let (result, server) = check(|request, _, blob| content(request, blob).stall(0));
    assert_eq!(
        result.unwrap_err(),
        "cannot fetch blob DIGEST of HOST/app at HOST (4 attempts): received nothing for 1.5 s"
    );
    assert_eq!(server.seen().len(), 4);
}

#[test]
fn progress_starts_the_count_anew() {
    let (result, server) = check(|request, _, blob| match content(request, blob) {
        reply if request.header("range") == Some("bytes=540000-") => reply,
        reply => reply.cut(60_000),
    });
    assert_eq!(result, Ok(()));
    assert_eq!(server.seen().len(), 10);
}

#[test]
fn lies_about_lengths() {
    let announced = "cannot fetch blob DIGEST of HOST/app at HOST: the server announces 599999 bytes instead of 600000";
    let (result, server) = check(|_, _, blob| reply(200).body(&blob[..599_999]));
    assert_eq!(result.unwrap_err(), announced);
    assert_eq!(server.seen().len(), 1);
    let (result, _) =
        check(|_, _, blob| reply(200).header("connection", "close").body([blob, b"x"].concat()));
    let endless =
        "cannot fetch blob DIGEST of HOST/app at HOST: the content has more than 600000 bytes";
    assert_eq!(result.unwrap_err(), endless);
    let (result, _) = check(|_, _, blob| reply(200).body(blob).endless());
    assert_eq!(result.unwrap_err(), endless);
}

#[test]
fn lies_about_ranges() {
    for range in [
        "bytes 99999-599999/600000",
        "bytes 100000-599999/600001",
        "bytes 100000-600000/*",
        "x",
        "",
    ] {
        let (result, server) = check(move |request, number, blob| match number {
            0 => content(request, blob).cut(100_000),
            _ => reply(206).header("content-range", range).body(&blob[100_000..]),
        });
        let expect = format!(
            "cannot fetch blob DIGEST of HOST/app at HOST (2 attempts): requested the bytes from \
             100000, but the server sent the range \"{range}\""
        );
        assert_eq!(result.unwrap_err(), expect);
        assert_eq!(server.seen().len(), 2);
    }
}

#[test]
fn a_blob_that_is_not_there() {
    let (result, server) = check(|_, _, _| {
        reply(404)
            .body(r#"{"errors":[{"code":"BLOB_UNKNOWN","message":"blob unknown to registry"}]}"#)
    });
    assert_eq!(
        result.unwrap_err(),
        "cannot fetch blob DIGEST of HOST/app at HOST: not found (the server says: \"blob unknown to \
         registry\")"
    );
    assert_eq!(server.seen().len(), 1);
    // The listener is dropped, so connections to its port are refused.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let registry = registry(&port.to_string(), &settings());
    // Only the first request retries. Later requests fail at once, because the host was unreachable a moment ago.
    for attempts in [" (4 attempts)", "", ""] {
        let reader = registry.blob(&digest(b""), Some(1), 0);
        let text = read(reader).unwrap_err();
        let expect = format!(
            "at {port}{attempts}: the connection is refused: no program listens at this address"
        );
        assert!(text.ends_with(&expect), "{text}");
    }
}

#[test]
fn cancelling_ends_a_read_soon() {
    let bytes = noise(1000);
    let server = Server::start(move |request, _| content(request, &bytes).stall(500));
    // With this timeout, only the cancellation can end the read.
    let settings = Settings { stall: Duration::from_secs(86_400), ..settings() };
    let mut reader = registry(&server.host(), &settings).blob(&digest(b"x"), Some(1000), 0);
    let mut half = [0; 500];
    reader.read_exact(&mut half).unwrap();
    let cancel = settings.cancel.clone();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        cancel.store(true, Ordering::Relaxed);
    });
    let text = chain(&reader.read(&mut half).unwrap_err());
    assert!(text.ends_with(": cancelled"), "{text}");
}

#[test]
fn memory_is_bounded_and_a_dropped_reader_hangs_up() {
    let server = Server::start(|_, _| reply(200).body(noise(1 << 20)).endless());
    let mut reader = registry(&server.host(), &settings()).blob(&digest(b"x"), None, 0);
    reader.read_exact(&mut [0; 10]).unwrap();
    // Without further reads, the client receives only as much as fits into the queued pieces and the socket buffers,
    // whose limits this machine sets (tcp(7)).
    let bound = |name: &str| -> u64 {
        let values = std::fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).unwrap();
        values.split_whitespace().last().unwrap().parse().unwrap()
    };
    let most = bound("tcp_rmem") + bound("tcp_wmem") + (4 << 20);
    let mut before = u64::MAX;
    wait_for("the server has to stop", || {
        std::thread::sleep(Duration::from_millis(300));
        let now = server.sent.load(Ordering::SeqCst);
        std::mem::replace(&mut before, now) == now
    });
    assert!(before < most, "{before} of at most {most} bytes");
    drop(reader);
    let again = Server::start(|_, _| reply(200).body(noise(1000)).endless());
    drop(registry(&again.host(), &settings()).blob(&digest(b"x"), Some(5), 0));
    assert_eq!(again.seen().len(), 0);
}

#[test]
fn mirrors_are_asked_first_and_in_turn() {
    let bytes = noise(300_000);
    let blob = bytes.clone();
    let own = Server::start(move |request, _| content(request, &blob));
    let blob = bytes.clone();
    // The first mirror lacks the blob, and the second one fails in the middle of it.
    let empty = Server::start(|_, _| reply(404));
    let weak = Server::start(move |request, _| content(request, &blob).cut(120_000));
    let text = format!(
        "[host.\"http://{}\"]\ncapabilities = [\"pull\"]\n[host.\"http://{}/prefix\"]\n\
         [host.\"http://{0}/unused\"]\ncapabilities = [\"resolve\"]",
        empty.host(),
        weak.host()
    );
    let hosts = Hosts::new(&own.host(), &text);
    let registry = registry(&own.host(), &hosts.settings());
    assert_same(&read(registry.blob(&digest(&bytes), Some(300_000), 0)).unwrap(), &bytes);
    let (name, namespace) = (digest(&bytes), own.host().replace(':', "%3A"));
    assert_eq!(empty.lines(), [format!("GET /v2/app/blobs/{name}?ns={namespace}")]);
    assert_eq!(weak.lines(), [format!("GET /prefix/v2/app/blobs/{name}?ns={namespace}")]);
    assert_eq!(own.lines(), [format!("GET /v2/app/blobs/{name}")]);
    assert_eq!(ranges(&own), ["bytes=120000-"]);
}

#[test]
fn who_gave_wrong_bytes_is_asked_last() {
    let bytes = noise(1000);
    let (mut flipped, right) = (bytes.clone(), bytes.clone());
    flipped[500] ^= 1;
    let liar = Server::start(move |request, _| content(request, &flipped));
    let own = Server::start(move |request, _| content(request, &right));
    let hosts = Hosts::new(&own.host(), &format!("[host.\"http://{}\"]", liar.host()));
    let registry = registry(&own.host(), &hosts.settings());
    let name = digest(&bytes);
    assert_ne!(digest(&read(registry.blob(&name, Some(1000), 0)).unwrap()), name);
    assert!(registry.distrust(&name), "there is another host");
    assert_eq!(digest(&read(registry.blob(&name, Some(1000), 0)).unwrap()), name);
    assert_eq!((liar.seen().len(), own.seen().len()), (1, 1));
    assert!(!registry.distrust(&name), "there is none that has not lied");
}

#[test]
fn parts_of_a_blob() {
    let bytes = noise(10_000);
    let wanted = [0..10, 5000..5000, 9990..10_000, 4000..6000];
    let expect: Vec<Vec<u8>> = wanted
        .iter()
        .map(|range| {
            bytes[usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap()]
                .to_vec()
        })
        .collect();
    let is_single = |request: &Request| !request.header("range").unwrap().contains(',');
    let several = move |request: &Request, bytes: &[u8]| {
        if is_single(request) {
            return content(request, bytes);
        }
        let mut body = Vec::new();
        for range in request.header("range").unwrap()["bytes=".len()..].split(',') {
            let (first, last) = range.split_once('-').unwrap();
            let (first, last): (usize, usize) = (first.parse().unwrap(), last.parse().unwrap());
            body.extend(
                format!("\r\n--B\r\nContent-Range: bytes {first}-{last}/10000\r\n\r\n")
                    .into_bytes(),
            );
            body.extend(&bytes[first..=last]);
        }
        body.extend(b"\r\n--B--\r\n");
        reply(206).header("content-type", "multipart/byteranges; boundary=B").body(body)
    };
    type Answer = Box<dyn Fn(&Request, &[u8]) -> Reply + Send + Sync>;
    let manners: [(Answer, usize); 4] = [
        (Box::new(several), 1),
        // The server ignores all ranges, refuses several ranges, or ignores several ranges.
        (Box::new(|_, bytes| reply(200).body(bytes)), 4),
        (
            Box::new(
                move |request, bytes| {
                    if is_single(request) { content(request, bytes) } else { reply(416) }
                },
            ),
            4,
        ),
        (
            Box::new(move |request, bytes| {
                if is_single(request) { content(request, bytes) } else { reply(200).body(bytes) }
            }),
            4,
        ),
    ];
    for (answer, requests) in manners {
        let blob = bytes.clone();
        let server = Server::start(move |request, _| answer(request, &blob));
        let registry = registry(&server.host(), &settings());
        assert_eq!(registry.ranges(&digest(&bytes), &wanted).unwrap(), expect);
        assert_eq!(server.seen().len(), requests);
        assert_eq!(registry.range(&digest(&bytes), 4000..6000).unwrap(), expect[3]);
    }
    let blob = bytes.clone();
    let liar = Server::start(move |_, _| {
        reply(206).header("content-range", "bytes 0-9/10000").body(&blob[..10])
    });
    let error = registry(&liar.host(), &settings()).range(&digest(&bytes), 10..20).unwrap_err();
    assert!(
        chain(&error).ends_with(
            "requested the bytes from 10, but the server sent the range \"bytes 0-9/10000\""
        ),
        "{error}"
    );
}

/// Some servers refuse ranges for a while, such as a cache that is still fetching the blob itself.
#[test]
fn a_refused_range_is_read_from_the_start() {
    let refuse = |request: &Request, blob: &[u8]| match request.header("range") {
        Some(_) => reply(416).header("content-range", &format!("bytes */{}", blob.len())),
        None => reply(200).body(blob),
    };
    let (result, server) = check(move |request, number, blob| match number {
        0 => reply(200).body(blob).cut(100_000),
        _ => refuse(request, blob),
    });
    assert_eq!(result, Ok(()));
    assert_eq!(ranges(&server), ["-", "bytes=100000-", "-"]);
    let bytes = noise(5000);
    let blob = bytes.clone();
    let server = Server::start(move |request, _| refuse(request, &blob));
    let registry = registry(&server.host(), &settings());
    assert_same(&registry.range(&digest(&bytes), 10..20).unwrap(), &bytes[10..20]);
    let middle = registry.blob(&digest(&bytes), Some(5000), 100).until(200);
    assert_same(&read(middle).unwrap(), &bytes[100..200]);
    let part = std::slice::from_ref(&(10..20));
    BlobSource::ranges(&registry, &digest(&bytes), 5000, part, Whole::Refuse).unwrap_err();
}

/// Without `Accept-Encoding`, any content coding is acceptable. Source: RFC 9110, 12.5.3.
#[test]
fn nobody_is_asked_for_compressed_answers() {
    let server = Server::start(|request, _| match request.path.contains("manifests") {
        true => reply(200).header("content-encoding", "gzip").body([0x1f, 0x8b, 8, 0]),
        false => content(request, b"abc"),
    });
    let registry = registry(&server.host(), &settings());
    let error = chain(&registry.manifest("a").unwrap_err());
    assert!(error.contains("Content-Encoding, gzip"), "{error}");
    read(registry.blob(&digest(b"abc"), Some(3), 0)).unwrap();
    registry.has_blob(&digest(b"abc"), None).unwrap();
    registry.put_manifest("a", "x/y", b"{}").unwrap();
    assert_eq!(server.seen().len(), 4);
    assert!(server.seen().iter().all(|it| it.header("accept-encoding") == Some("identity")));
}
