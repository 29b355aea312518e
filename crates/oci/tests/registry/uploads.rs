use std::sync::Mutex;

use quire_oci::registry::Cause;

use super::*;
use testing::fake::{Reply, Request, Server, reply};

/// The state of an upload in a registry.
#[derive(Default)]
struct Kept {
    bytes: Vec<u8>,
    finished: Option<String>,
    patches: usize,
}

/// Starts a registry that accepts uploads. For each PATCH, `fault` returns how many bytes arrive, and the response.
fn taking(
    fault: impl Fn(usize) -> Option<(usize, Reply)> + Send + Sync + 'static,
) -> (Server, std::sync::Arc<Mutex<Kept>>) {
    let kept = std::sync::Arc::new(Mutex::new(Kept::default()));
    let state = std::sync::Arc::clone(&kept);
    let server = Server::start(move |request: &Request, _| {
        let mut kept = state.lock().unwrap();
        let at = |kept: &Kept| {
            let last = kept.bytes.len().saturating_sub(1);
            let location = format!("/up/1?state={}", kept.bytes.len());
            reply(202).header("location", &location).header("range", &format!("0-{last}"))
        };
        match request.method.as_str() {
            "HEAD" if kept.finished.is_some() => reply(200),
            "HEAD" => reply(404),
            "POST" => {
                *kept = Kept { patches: kept.patches, ..Kept::default() };
                at(&kept)
            }
            "GET" => at(&kept).status(204),
            "PATCH" => {
                let expect =
                    format!("{}-{}", kept.bytes.len(), kept.bytes.len() + request.body.len() - 1);
                assert_eq!(request.header("content-range"), Some(expect.as_str()));
                assert_eq!(request.path, format!("/up/1?state={}", kept.bytes.len()));
                kept.patches += 1;
                if let Some((arrived, answer)) = fault(kept.patches) {
                    kept.bytes.extend(&request.body[..arrived]);
                    return answer;
                }
                kept.bytes.extend(&request.body);
                at(&kept)
            }
            "PUT" => {
                kept.bytes.extend(&request.body);
                kept.finished =
                    request.path.split_once("digest=").map(|(_, digest)| digest.to_owned());
                reply(201)
            }
            _ => reply(405),
        }
    });
    (server, kept)
}

/// Uploads `length` bytes. Returns the result, and the methods of the requests.
fn check(
    length: usize,
    fault: impl Fn(usize) -> Option<(usize, Reply)> + Send + Sync + 'static,
) -> (Result<(), String>, String) {
    let bytes = noise(length);
    let (server, kept) = taking(fault);
    let registry = registry(&server.host(), &settings());
    let result = registry.upload_blob(&digest(&bytes), length as u64, &mut &bytes[..]);
    if result.is_ok() {
        let kept = kept.lock().unwrap();
        assert_same(&kept.bytes, &bytes);
        assert_eq!(kept.finished, Some(digest(&bytes).to_string().replace(':', "%3A")));
    }
    let methods: Vec<_> = server.seen().into_iter().map(|request| request.method).collect();
    (result.map_err(|error| chain(&error)), methods.join(" "))
}

const CHUNK: usize = 16 << 20;

#[test]
fn small_blobs_take_two_requests() {
    for length in [0, 1, 100_000, CHUNK] {
        assert_eq!(check(length, |_| None), (Ok(()), "POST PUT".to_owned()));
    }
}

#[test]
fn large_blobs_go_in_chunks() {
    assert_eq!(check(2 * CHUNK + 5, |_| None), (Ok(()), "POST PATCH PATCH PATCH PUT".to_owned()));
}

/// Source: OCI distribution-spec 1.1, "Pushing a blob in chunks": all chunks but the last have the minimum size.
#[test]
fn chunks_have_the_size_that_the_registry_requires() {
    if !testing::long_tests() {
        return;
    }
    let push = |least: u64, size: u64| {
        let server = Server::start(move |request: &Request, _| match request.method.as_str() {
            "POST" | "PATCH" => reply(202)
                .header("location", "/up/1")
                .header("oci-chunk-min-length", &least.to_string()),
            _ => reply(201),
        });
        let mut hasher = digest(b"").hasher();
        let zeros = vec![0; 1 << 20];
        (0..size >> 20).for_each(|_| hasher.update(&zeros));
        let reader = &mut std::io::Read::take(std::io::repeat(0), size);
        let host = server.host();
        let sent = registry(&host, &settings()).upload_blob(&hasher.finish(), size, reader);
        let sent = sent.map_err(|error| chain(&error).replace(&host, "HOST"));
        let chunk = |it: &Request| format!("{} {}", it.method, it.body.len() >> 20);
        (sent, server.seen().iter().map(chunk).collect::<Vec<_>>())
    };
    let mib = |count: u64| count << 20;
    let (sent, seen) = push(mib(40), mib(41));
    assert_eq!(sent, Ok(()));
    assert_eq!(seen, ["POST 0", "PATCH 40", "PATCH 1", "PUT 0"]);
    // The last chunk may be smaller than the minimum, also if it is the only one.
    let (sent, seen) = push(mib(1000), mib(17));
    assert_eq!(sent, Ok(()));
    assert_eq!(seen, ["POST 0", "PATCH 17", "PUT 0"]);
}

#[test]
fn chunks_that_would_fill_the_memory_are_refused() {
    let server = Server::start(move |request: &Request, _| match request.method.as_str() {
        "POST" => {
            reply(202).header("location", "/up/1").header("oci-chunk-min-length", "1099511627776")
        }
        _ => reply(204),
    });
    let reader = &mut std::io::repeat(0);
    let sent = registry(&server.host(), &settings()).upload_blob(&digest(b"x"), 1 << 40, reader);
    let error = chain(&sent.unwrap_err());
    let expect = "it requires chunks of at least 1099511627776 bytes, and Quire sends at most 67108864 bytes at once";
    assert!(error.ends_with(expect), "{error}");
    let methods: Vec<_> = server.seen().into_iter().map(|request| request.method).collect();
    assert_eq!(methods, ["POST", "DELETE"]);
}

#[test]
fn an_interrupted_chunk_is_continued() {
    // None of the second chunk, a part of it, or all of it arrives, and the response is lost.
    for (arrived, expect) in [
        (0, "POST PATCH PATCH GET PATCH PUT"),
        (1_000_000, "POST PATCH PATCH GET PATCH PUT"),
        (CHUNK / 2, "POST PATCH PATCH GET PUT"),
    ] {
        let fault = move |number| (number == 2).then(|| (arrived, reply(503)));
        assert_eq!(check(CHUNK + CHUNK / 2, fault), (Ok(()), expect.to_owned()), "{arrived}");
    }
    let (result, methods) = check(CHUNK + 1, |_| Some((0, reply(500))));
    assert!(result.unwrap_err().ends_with("(4 attempts): the server returned status 500"));
    assert_eq!(methods, "POST PATCH GET PATCH GET PATCH GET PATCH");
}

#[test]
fn what_is_read_must_be_what_was_promised() {
    let bytes = noise(1000);
    let (server, kept) = taking(|_| None);
    let registry = registry(&server.host(), &settings());
    let send = |digest: &Digest, size: u64, bytes: &[u8]| {
        chain(&registry.upload_blob(digest, size, &mut &bytes[..]).unwrap_err())
    };
    assert!(
        send(&digest(&bytes), 1001, &bytes).ends_with("the content ended after 1000 of 1001 bytes")
    );
    assert!(send(&digest(&bytes), 999, &bytes).ends_with("the content has more than 999 bytes"));
    assert!(send(&digest(b"x"), 1000, &bytes).contains("the content has the digest"));
    let large = noise(CHUNK + 1);
    assert!(send(&digest(b"x"), large.len() as u64, &large).contains("the content has the digest"));
    assert_eq!(kept.lock().unwrap().finished, None);
    let methods: Vec<_> = server.seen().into_iter().map(|request| request.method).collect();
    assert_eq!(methods, ["POST", "PATCH", "PATCH", "DELETE"]);
}

#[test]
fn mounts_and_looks() {
    let server = Server::start(|request, _| match request.method.as_str() {
        "HEAD" => reply(if request.path.contains(&digest(b"a").to_string()) { 200 } else { 404 }),
        "POST" if request.path.contains("from=base") => reply(201),
        "POST" => reply(202).header("location", "/up/7"),
        _ => reply(204),
    });
    let registry = registry(&server.host(), &settings());
    assert!(registry.has_blob(&digest(b"a"), None).unwrap());
    assert!(!registry.has_blob(&digest(b"b"), None).unwrap());
    assert!(registry.mount_blob(&digest(b"a"), "base").unwrap());
    assert!(!registry.mount_blob(&digest(b"a"), "other").unwrap());
    let mount = format!("mount={}", digest(b"a")).replace(':', "%3A");
    assert_eq!(
        server.lines()[2..],
        [
            format!("POST /v2/app/blobs/uploads/?{mount}&from=base"),
            format!("POST /v2/app/blobs/uploads/?{mount}&from=other"),
            "DELETE /up/7".to_owned()
        ]
    );
}

#[test]
fn manifests_are_put_and_compared() {
    let server = Server::start(|request, _| {
        let claimed = if request.path.ends_with("/lie") { b"x".as_slice() } else { &request.body };
        let good = reply(201).header("docker-content-digest", &digest(claimed).to_string());
        if request.path.ends_with("/subject") { good.header("oci-subject", "x") } else { good }
    });
    let registry = registry(&server.host(), &settings());
    let kind = "application/vnd.oci.image.manifest.v1+json";
    let stored = registry.put_manifest("tag", kind, b"{}").unwrap();
    assert_eq!((stored.digest, stored.knows_subject), (digest(b"{}"), false));
    assert!(registry.put_manifest("subject", kind, b"{}").unwrap().knows_subject);
    assert_eq!(server.seen()[0].header("content-type"), Some(kind));
    assert_eq!(server.seen()[0].body, b"{}");
    let error = registry.put_manifest("lie", kind, b"{}").unwrap_err();
    assert!(chain(&error).contains("but the server states"), "{error:?}");
    let error = registry.put_manifest(&digest(b"x").to_string(), kind, b"{}").unwrap_err();
    assert!(chain(&error).contains("the content has the digest"), "{error:?}");
    assert_eq!(server.seen().len(), 3);
}

#[test]
fn pushes_go_to_the_registry_itself() {
    let own = Server::start(|_, _| reply(201));
    let mirror = Server::start(|_, _| reply(201));
    let hosts = Hosts::new(&own.host(), &format!("[host.\"http://{}\"]", mirror.host()));
    registry(&own.host(), &hosts.settings()).put_manifest("a", "x/y", b"{}").unwrap();
    assert_eq!((mirror.seen().len(), own.seen().len()), (0, 1));
    let text = format!("[host.\"http://{}\"]\ncapabilities = [\"push\"]", mirror.host());
    let hosts = Hosts::new(&own.host(), &text);
    registry(&own.host(), &hosts.settings()).put_manifest("a", "x/y", b"{}").unwrap();
    assert_eq!((mirror.seen().len(), own.seen().len()), (1, 1));
}

const UNKNOWN: &str =
    r#"{"errors":[{"code":"BLOB_UPLOAD_UNKNOWN","message":"blob upload unknown"}]}"#;

/// Starts a registry whose response to the first PUT is `first`.
fn put_once(first: impl Fn() -> Reply + Send + Sync + 'static) -> Server {
    let puts = Mutex::new(0);
    Server::start(move |request: &Request, _| match request.method.as_str() {
        "HEAD" => reply(404),
        "POST" => reply(202).header("location", "/up/1"),
        "PUT" => {
            let mut puts = puts.lock().unwrap();
            *puts += 1;
            if *puts == 1 { first() } else { reply(201) }
        }
        _ => reply(405),
    })
}

/// Source: OCI distribution-spec 1.1, "Error Codes": BLOB_UPLOAD_UNKNOWN, "the client must start over".
#[test]
fn an_upload_that_the_registry_does_not_know_begins_anew() {
    let server = put_once(|| reply(404).body(UNKNOWN));
    let small = noise(1000);
    registry(&server.host(), &settings())
        .upload_blob(&digest(&small), 1000, &mut &small[..])
        .unwrap();
    let methods: Vec<_> = server.seen().into_iter().map(|request| request.method).collect();
    assert_eq!(methods, ["POST", "PUT", "HEAD", "POST", "PUT"]);
    // An upload in chunks must be read again, which only the caller can do.
    let large = noise(CHUNK + 1);
    let (server, _) = taking(|patch| (patch == 2).then(|| (0, reply(404).body(UNKNOWN))));
    let registry = registry(&server.host(), &settings());
    let send = || registry.upload_blob(&digest(&large), large.len() as u64, &mut &large[..]);
    let error = send().unwrap_err();
    assert!(matches!(error.cause(), Cause::UploadLost(_)), "{error:?}");
    send().unwrap();
}

#[test]
fn a_registry_that_is_silent_after_an_upload_is_asked_again() {
    let server = put_once(|| reply(201).delay(Duration::from_secs(20)));
    let bytes = noise(1000);
    let settings = Settings { stall: Duration::from_millis(200), ..settings() };
    let begun = std::time::Instant::now();
    registry(&server.host(), &settings)
        .upload_blob(&digest(&bytes), 1000, &mut &bytes[..])
        .unwrap();
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    let methods: Vec<_> = server.seen().into_iter().map(|request| request.method).collect();
    assert_eq!(methods, ["POST", "PUT", "HEAD", "POST", "PUT"]);
}
