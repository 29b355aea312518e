use super::*;
use testing::fake::{Server, content, reply};

const OCI: &str = "application/vnd.oci.image.manifest.v1+json";

#[test]
fn manifests() {
    let server = Server::start(|_, _| {
        let kind = format!("{OCI}; charset=utf-8");
        reply(200)
            .header("content-type", &kind)
            .header("docker-content-digest", &digest(b"{}").to_string())
            .body("{}")
    });
    let registry = registry(&server.host(), &settings());
    for name in ["3.20".to_owned(), digest(b"{}").to_string()] {
        let fetched = registry.manifest(&name).unwrap();
        assert_eq!((fetched.digest, fetched.media_type.as_str()), (digest(b"{}"), OCI));
        assert_eq!(fetched.bytes, b"{}");
    }
    assert_eq!(server.lines()[0], "GET /v2/app/manifests/3.20");
    assert!(server.seen()[0].header("accept").unwrap().contains(OCI));
}

/// Fetches a manifest by tag and by the digest of `{}` from a server with this response. Checks the ends of the
/// errors.
fn check(body: &'static str, claimed: Option<String>, by_tag: &str, by_digest: &str) {
    let server = Server::start(move |_, _| match &claimed {
        Some(claimed) => reply(200).header("docker-content-digest", claimed).body(body),
        None => reply(200).body(body),
    });
    let registry = registry(&server.host(), &settings());
    for (name, expect) in [("tag".to_owned(), by_tag), (digest(b"{}").to_string(), by_digest)] {
        let got =
            registry.manifest(&name).map_or_else(|error| chain(&error), |_| "good".to_owned());
        assert!(got.ends_with(expect), "{name}: {got}");
    }
    assert_eq!(server.seen().len(), 2, "lies are not asked for again");
}

#[test]
fn lies_about_digests() {
    let (empty, other) = (digest(b"{}"), digest(b"[]"));
    let wrong = format!("the content has the digest {other}, not {empty}");
    check("{}", None, "good", "good");
    check("[]", None, "good", &wrong);
    check("[]", Some(other.to_string()), "good", &wrong);
    let claim = format!("the content has the digest {other}, but the server states \"{empty}\"");
    check("[]", Some(empty.to_string()), &claim, &wrong);
    let claim = format!("the content has the digest {empty}, but the server states \"{other}\"");
    check("{}", Some(other.to_string()), &claim, &claim);
    check("{}", Some("sha3:12".to_owned()), "good", "good");
}

#[test]
fn a_mirror_that_lies_is_passed_over() {
    let own = Server::start(|_, _| reply(200).body("{}"));
    let mirror = Server::start(|_, _| reply(200).body("[]"));
    let hosts = Hosts::new(&own.host(), &format!("[host.\"http://{}\"]", mirror.host()));
    let fetched = registry(&own.host(), &hosts.settings()).manifest(&digest(b"{}").to_string());
    assert_eq!(fetched.unwrap().bytes, b"{}");
    assert_eq!((mirror.seen().len(), own.seen().len()), (1, 1));
}

#[test]
fn manifests_are_bounded() {
    for announced in [true, false] {
        let server = Server::start(move |request, _| {
            let huge = content(request, &noise((4 << 20) + 1));
            if announced { huge } else { huge.header("connection", "close") }
        });
        let error = registry(&server.host(), &settings()).manifest("a").unwrap_err();
        assert!(chain(&error).ends_with("the content has more than 4194304 bytes"), "{error:?}");
    }
    let server = Server::start(|_, _| reply(200).body(noise(1000)).endless());
    let error = registry(&server.host(), &settings()).manifest("a").unwrap_err();
    assert!(chain(&error).ends_with("the content has more than 4194304 bytes"), "{error:?}");
}

#[test]
fn a_broken_manifest_is_asked_for_again() {
    let server = Server::start(|_, number| match number {
        0 => reply(200).body("{\"a\":1}").cut(3),
        1 => reply(200).body("{\"a\":1}").stall(3),
        _ => reply(200).body("{\"a\":1}"),
    });
    assert_eq!(registry(&server.host(), &settings()).manifest("a").unwrap().bytes, b"{\"a\":1}");
    assert_eq!(server.seen().len(), 3);
}

#[test]
fn what_is_not_there() {
    let server = Server::start(|_, _| reply(404).body(r#"{"errors":[{"code":"NAME_UNKNOWN"}]}"#));
    let error = registry(&server.host(), &settings()).manifest("a").unwrap_err();
    assert!(error.is_not_found() && error.host() == server.host());
    assert!(
        chain(&error)
            .ends_with("the repository does not exist (the server says: \"NAME_UNKNOWN\")"),
        "{error:?}"
    );
    // A refusal by the registry ends the request at once, even if a mirror is unreachable.
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let hosts = Hosts::new(&server.host(), &format!("[host.\"http://{nobody}\"]"));
    let registry = registry(&server.host(), &hosts.settings());
    assert!(registry.manifest("a").unwrap_err().is_not_found());
    assert_eq!(server.seen().len(), 2);
    assert!(registry.manifest("a").unwrap_err().is_not_found());
}

#[test]
fn a_tag_is_not_asked_of_who_may_not_resolve() {
    let own = Server::start(|_, _| reply(200).body("{}"));
    let mirror = Server::start(|_, _| reply(200).body("{}"));
    let text = format!("[host.\"http://{}\"]\ncapabilities = [\"pull\"]", mirror.host());
    let hosts = Hosts::new(&own.host(), &text);
    let registry = registry(&own.host(), &hosts.settings());
    registry.manifest("tag").unwrap();
    assert_eq!((mirror.seen().len(), own.seen().len()), (0, 1));
    registry.manifest(&digest(b"{}").to_string()).unwrap();
    assert_eq!((mirror.seen().len(), own.seen().len()), (1, 1));
}

#[test]
fn tags_come_in_pages() {
    if !testing::long_tests() {
        return;
    }
    let server = Server::start(|request, _| match request.path.as_str() {
        "/v2/app/tags/list?n=1000" => reply(200)
            .header("link", "</v2/app/tags/list?last=b&n=1000>; rel=\"next\"")
            .body(r#"{"name":"app","tags":["a","b"]}"#),
        "/v2/app/tags/list?last=b&n=1000" => reply(200).body(r#"{"name":"app","tags":["c"]}"#),
        _ => reply(404),
    });
    assert_eq!(registry(&server.host(), &settings()).tags().unwrap(), ["a", "b", "c"]);
    let server = Server::start(|_, _| reply(200).body(r#"{"name":"app","tags":null}"#));
    assert!(registry(&server.host(), &settings()).tags().unwrap().is_empty());
}

/// A part of a list would look complete: a signature or a newer tag would be missing without an error.
#[test]
fn lists_without_an_end_are_refused() {
    if !testing::long_tests() {
        return;
    }
    let server = Server::start(|request, _| {
        reply(200).header("link", &format!("<{}>; rel=next", request.path)).body("{}")
    });
    let (host, registry) = (server.host(), registry(&server.host(), &settings()));
    let subject = digest(b"{}");
    let check = |error: &dyn std::error::Error, what: &str| {
        let expect = format!(
            "cannot {what} of {host}/app at {host}: cannot use the server's response: there are 501 pages, more than 500"
        );
        assert_eq!(chain(error), expect);
    };
    check(&registry.tags().unwrap_err(), "list the tags");
    let error = registry.referrers(&subject, None).unwrap_err();
    check(&error, &format!("list the referrers of {subject}"));
    assert_eq!(server.seen().len(), 1000);
}

#[test]
fn a_page_that_is_missing_is_an_error() {
    let server = Server::start(|request, _| match request.path.contains("?last=") {
        true => reply(404),
        false => reply(200).header("link", "<?last=a>; rel=next").body("{}"),
    });
    let registry = registry(&server.host(), &settings());
    assert!(registry.tags().unwrap_err().is_not_found());
    assert!(registry.referrers(&digest(b"{}"), None).unwrap_err().is_not_found());
}

#[test]
fn referrers() {
    let subject = digest(b"{}");
    let entry = |kind: &str| {
        format!(
            "{{\"mediaType\":\"{OCI}\",\"digest\":\"{}\",\"size\":2,\"artifactType\":\"{kind}\"}}",
            digest(kind.as_bytes())
        )
    };
    let list = format!("{{\"schemaVersion\":2,\"manifests\":[{},{}]}}", entry("a"), entry("b"));
    for by_tag in [false, true] {
        let list = list.clone();
        let server = Server::start(move |request, _| match request.path.contains("/referrers/") {
            true if by_tag => reply(404),
            _ => reply(200).body(&list),
        });
        let registry = registry(&server.host(), &settings());
        assert_eq!(registry.referrers(&subject, None).unwrap().len(), 2);
        let found = registry.referrers(&subject, Some("b")).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].descriptor.digest, digest(b"b"));
        let lines = server.lines();
        assert!(
            lines.contains(&format!("GET /v2/app/referrers/{subject}?artifactType=b")),
            "{lines:?}"
        );
        let tag = format!("GET /v2/app/manifests/{}", subject.to_string().replace(':', "-"));
        assert_eq!(lines.contains(&tag), by_tag);
    }
    let server = Server::start(|_, _| reply(404));
    assert!(registry(&server.host(), &settings()).referrers(&subject, None).unwrap().is_empty());
}
