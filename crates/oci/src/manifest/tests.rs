use super::*;
use testing::chain;

const A: &str = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
const B: &str = "sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";

/// Expands the placeholders `A`, `B` and `LAYER`, which keep the rows short.
fn full(text: &str) -> String {
    let text = text.replace("LAYER", "application/vnd.oci.image.layer.v1.tar+gzip");
    text.replace("\"A\"", &format!("\"{A}\"")).replace("\"B\"", &format!("\"{B}\""))
}

fn check(text: &str, expect: &str) {
    let got = match Document::parse(full(text).as_bytes()) {
        Ok(Document::Image(image)) => {
            let layers = image.layers.iter().map(|layer| format!(" {}", layer.size));
            format!("image {}{}", image.config.size, layers.collect::<String>())
        }
        Ok(Document::Index(index)) => format!("index of {}", index.manifests.len()),
        Err(error) => chain(&error),
    };
    assert_eq!(got, expect, "{text}");
}

#[test]
fn manifests() {
    let config = r#""config":{"digest":"A","size":7}"#;
    let with = |rest: &str| format!(r#"{{"schemaVersion":2,{config},{rest}}}"#);
    check(&with(r#""layers":[]"#), "image 7");
    check(&with(r#""layers":[{"mediaType":"LAYER","digest":"B","size":9}]"#), "image 7 9");
    // Unknown fields are ignored, and Docker writes null for missing values.
    check(
        &with(
            r#""layers":[{"digest":"B","size":9,"urls":["x"],"annotations":null,"data":"eA==","y":[{}]}],"subject":{"z":1}"#,
        ),
        "image 7 9",
    );
    for media_type in [
        "application/vnd.oci.image.layer.v1.tar",
        "application/vnd.oci.image.layer.v1.tar+zstd",
        "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
        "application/vnd.docker.image.rootfs.diff.tar",
        "application/vnd.docker.image.rootfs.diff.tar.gzip",
        "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
        "application/vnd.erofs.layer.v1",
        "application/vnd.erofs.layer.v1+zstd",
        "",
    ] {
        let layer = format!(r#"{{"mediaType":"{media_type}","digest":"B","size":9}}"#);
        check(&with(&format!(r#""layers":[{layer}]"#)), "image 7 9");
    }
    for media_type in [
        "application/vnd.oci.image.layer.v1.tar+gzip+encrypted",
        "application/vnd.cncf.helm.chart.content.v1.tar+gzip",
        "application/vnd.oci.empty.v1+json",
        "application/vnd.erofs.layer.v1+gzip",
        "application/vnd.erofs.layer.v10",
    ] {
        let layer = format!(r#"{{"mediaType":"{media_type}","digest":"B","size":9}}"#);
        let expect = format!(
            "layer 1 is \"{media_type}\", which is neither a tar of files nor an EROFS image"
        );
        check(&with(&format!(r#""layers":[{layer}]"#)), &expect);
    }
    let config = |kind: &str, rest: &str| {
        let config = format!(r#"{{"mediaType":"{kind}","digest":"A","size":7}}"#);
        format!(r#"{{"schemaVersion":2,"config":{config},"layers":[]{rest}}}"#)
    };
    let typed = r#","artifactType":"a/b""#;
    for kind in [
        "application/vnd.oci.image.config.v1+json",
        "application/vnd.docker.container.image.v1+json",
        "application/octet-stream",
    ] {
        check(&config(kind, ""), "image 7");
        // An artifact type only serves listings, so this image can be mounted.
        check(&config(kind, typed), "image 7");
    }
    for (kind, rest, named) in [
        (
            "application/vnd.cncf.helm.config.v1+json",
            "",
            "application/vnd.cncf.helm.config.v1+json",
        ),
        ("application/vnd.oci.empty.v1+json", typed, "a/b"),
        ("application/vnd.oci.empty.v1+json", "", "application/vnd.oci.empty.v1+json"),
    ] {
        let expect = format!("it is an artifact of type \"{named}\", not an image");
        check(&config(kind, rest), &expect);
    }
    let docker = "application/vnd.docker.distribution.manifest.v2+json";
    check(&with(&format!(r#""mediaType":"{docker}","layers":[]"#)), "image 7");
    let list = "application/vnd.docker.distribution.manifest.list.v2+json";
    check(
        &with(&format!(r#""mediaType":"{list}","layers":[]"#)),
        &format!("the manifest states the media type \"{list}\""),
    );
    check(r#"{"schemaVersion":2,"manifests":[]}"#, "index of 0");
    check(r#"{"schemaVersion":2,"manifests":[{"digest":"A","size":1}]}"#, "index of 1");
    check(
        &format!(r#"{{"schemaVersion":2,"mediaType":"{docker}","manifests":[]}}"#),
        &format!("the manifest states the media type \"{docker}\""),
    );
}

#[test]
fn what_two_readers_would_read_differently() {
    check(
        r#"{"schemaVersion":2,"manifests":[],"layers":[]}"#,
        "the manifest has both \"manifests\" and \"layers\"",
    );
    check(
        r#"{"schemaVersion":2,"manifests":[],"config":{"digest":"A","size":7}}"#,
        "the manifest has both \"manifests\" and \"config\"",
    );
    check(
        r#"{"schemaVersion":2,"layers":[],"layers":[],"config":{"digest":"A","size":7}}"#,
        "the manifest is malformed: duplicate field `layers` at line 1 column 39",
    );
}

#[test]
fn what_is_no_manifest() {
    check("", "the manifest is malformed: EOF while parsing a value at line 1 column 0");
    check(
        r#"{"schemaVersion":1,"fsLayers":[]}"#,
        "manifests of schema version 1 are not supported, only 2",
    );
    check(
        r#"{"schemaVersion":2}"#,
        "the manifest is malformed: it has neither \"manifests\" nor \"layers\"",
    );
    check(
        r#"{"schemaVersion":2,"layers":[]}"#,
        "the manifest is malformed: it has neither \"manifests\" nor \"config\"",
    );
    let size = |size: &str| {
        format!(r#"{{"schemaVersion":2,"manifests":[{{"digest":"A","size":{size}}}]}}"#)
    };
    check(&size("9223372036854775807"), "index of 1");
    for wrong in ["-1", "1.5", "18446744073709551616", "\"1\"", "null"] {
        let result = Document::parse(full(&size(wrong)).as_bytes());
        assert!(matches!(result, Err(ManifestError::Json { .. })), "{wrong}: {result:?}");
    }
    for wrong in ["", "sha256:", "md5:aa", "sha256:AAAA", "../../etc/passwd"] {
        let text =
            format!(r#"{{"schemaVersion":2,"manifests":[{{"digest":"{wrong}","size":1}}]}}"#);
        let result = Document::parse(text.as_bytes());
        assert!(matches!(result, Err(ManifestError::Json { .. })), "{wrong}: {result:?}");
    }
    let long = " ".repeat(usize::try_from(MANIFEST_MAX).unwrap() + 1);
    check(&long, "the manifest has 4194305 bytes, more than 4194304");
    let layers = vec![r#"{"digest":"A","size":1}"#; 513].join(",");
    check(
        &format!(r#"{{"schemaVersion":2,"config":{{"digest":"A","size":7}},"layers":[{layers}]}}"#),
        "there are 513 layers, more than 512",
    );
}

fn entry(platform: &str, size: u64) -> String {
    let parts: Vec<_> = platform.split('/').collect();
    let platform = match parts[..] {
        [""] => String::new(),
        ["attestation"] => {
            r#","platform":{"os":"unknown","architecture":"unknown"},"annotations":{"vnd.docker.reference.type":"attestation-manifest"}"#
                .to_owned()
        }
        [os, arch] => format!(r#","platform":{{"os":"{os}","architecture":"{arch}"}}"#),
        [os, arch, variant] => {
            format!(r#","platform":{{"os":"{os}","architecture":"{arch}","variant":"{variant}"}}"#)
        }
        _ => panic!("{platform}"),
    };
    format!(r#"{{"digest":"{A}","size":{size}{platform}}}"#)
}

/// Checks which entry of an index is chosen, counted from 1.
fn check_choice(entries: &[&str], wanted: &str, expect: &str) {
    let entries: Vec<_> = (1..).zip(entries).map(|(size, text)| entry(text, size)).collect();
    let text = format!(r#"{{"schemaVersion":2,"manifests":[{}]}}"#, entries.join(","));
    let Document::Index(index) = Document::parse(text.as_bytes()).unwrap() else { panic!() };
    let got = match index.choose(&wanted.parse().unwrap()) {
        Ok(chosen) => chosen.size.to_string(),
        Err(error) => error.to_string(),
    };
    assert_eq!(got, expect, "{entries:?} {wanted}");
}

#[test]
fn foreign_layers_say_where_they_are() {
    let title = |rest: &str| {
        let text = format!(r#"{{"digest":"{A}","size":1{rest}}}"#);
        serde_json::from_str::<Descriptor>(&text).unwrap().title().replace(A, "A")
    };
    assert_eq!(title(r#","urls":null"#), "A");
    assert_eq!(title(r#","urls":["https://a/b","c"]"#), "A, a foreign layer of https://a/b, c");
    let media_type = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip";
    assert_eq!(
        title(&format!(r#","mediaType":"{media_type}""#)),
        "A, a foreign layer without an address"
    );
}

/// Source: containerd's `platforms` package, `database.go` and `compare.go`. Its issues 2133 and 2991, and moby's
/// 34875, 37647 and 41017 show the errors of simpler comparisons.
#[test]
fn platforms() {
    let all = ["linux/amd64", "linux/arm/v6", "linux/arm/v7", "linux/arm64/v8", "windows/amd64"];
    check_choice(&all, "linux/amd64", "1");
    check_choice(&all, "linux/arm/v7", "3");
    check_choice(&all, "linux/arm", "3");
    check_choice(&all, "linux/arm64", "4");
    check_choice(
        &all,
        "linux/s390x",
        "there is no image for linux/s390x, only for linux/amd64, linux/arm/v6, linux/arm/v7, linux/arm64/v8, windows/amd64",
    );
    check_choice(&["attestation", "linux/amd64"], "linux/amd64", "2");
    check_choice(
        &["attestation"],
        "linux/amd64",
        "there is no image for linux/amd64, only for nothing",
    );
    check_choice(&[""], "linux/amd64", "1");
    check_choice(&["", "linux/amd64"], "linux/amd64", "2");
    check_choice(&["linux/amd64", "linux/amd64"], "linux/amd64", "1");
    check_choice(&["linux/amd64/v3", "linux/amd64"], "linux/amd64", "2");
    let variants = ["linux/arm/v5", "linux/arm/v6", "linux/arm/v7", "linux/arm/v8", "linux/arm64"];
    check_choice(&variants, "linux/arm", "3");
    check_choice(&variants, "linux/arm/v6", "2");
    check_choice(&variants[..1], "linux/arm/v7", "1");
    check_choice(&variants, "linux/arm64/v8", "5");
    check_choice(&["linux/arm/v6", "linux/arm/v5"], "linux/arm/v7", "1");
    check_choice(&["linux/arm/v5", "linux/arm/v6"], "linux/arm/v7", "2");
    check_choice(&["linux/arm"], "linux/arm/v7", "1");
    check_choice(
        &["linux/arm/v7"],
        "linux/arm/v6",
        "there is no image for linux/arm/v6, only for linux/arm/v7",
    );
    check_choice(&["linux/amd64/v9", "linux/amd64"], "linux/amd64", "2");
    check_choice(&["linux/amd64", "linux/amd64/v2"], "linux/amd64/v3", "2");
    check_choice(
        &["linux/amd64/v3"],
        "linux/amd64",
        "there is no image for linux/amd64, only for linux/amd64/v3",
    );
    check_choice(
        &["linux/386"],
        "linux/amd64",
        "there is no image for linux/amd64, only for linux/386",
    );
    check_choice(&["linux/arm64/v8.1", "linux/arm64/v9"], "linux/arm64/v8.2", "1");
    check_choice(&["linux/arm64/v8.5", "linux/arm64/v8.6"], "linux/arm64/v9", "1");
    check_choice(&["linux/arm64/v8.6"], "linux/arm64/v9.1", "1");
    check_choice(&["linux/arm64/v300.1", "linux/arm64/v"], "linux/arm64/v300.1", "1");
    for (there, wanted) in [
        ("linux/x86_64", "linux/amd64"),
        ("linux/x86-64/v1", "linux/amd64"),
        ("linux/aarch64", "linux/arm64"),
        ("linux/arm64", "linux/aarch64"),
        ("linux/arm64/8", "linux/arm64"),
        ("Linux/AMD64", "linux/amd64"),
        ("linux/amd64", "LINUX/x86_64"),
        ("linux/i386", "linux/386"),
        ("linux/armhf", "linux/arm"),
        ("linux/armel", "linux/arm/v6"),
        ("linux/arm/7", "linux/armhf"),
        ("macos/arm64", "darwin/arm64"),
    ] {
        check_choice(&[there], wanted, "1");
    }
    assert_eq!("Linux/x86_64".parse::<Platform>().unwrap().to_string(), "linux/amd64");
    assert_eq!("linux/arm64/v8".parse::<Platform>().unwrap().to_string(), "linux/arm64/v8");
    // Most configs have no variant.
    let is_for = |wanted: &str, config: &str| {
        wanted.parse::<Platform>().unwrap().may_be(&config.parse().unwrap())
    };
    assert!(is_for("linux/arm/v6", "linux/arm") && is_for("linux/arm", "linux/arm/v6"));
    assert!(!is_for("linux/arm/v6", "linux/arm/v7") && !is_for("linux/amd64", "linux/arm64"));
    for wrong in ["", "linux", "linux/", "/amd64", "linux/arm/", "a/b/c/d"] {
        assert!(wrong.parse::<Platform>().is_err(), "{wrong}");
    }
    assert_eq!(Platform::linux("x86_64").to_string(), "linux/amd64");
    assert_eq!(Platform::linux("aarch64").to_string(), "linux/arm64");
    assert_eq!(Platform::linux("riscv64").to_string(), "linux/riscv64");
}

#[test]
fn configs() {
    let text = full(
        r#"{"architecture":"amd64","os":"linux","created":"now","config":{"Env":["A=b c"],"Cmd":null,
        "Entrypoint":["/x"],"User":"1:2","WorkingDir":"/w","Labels":{"k":"v"},"ExposedPorts":{"1/tcp":{}}},
        "rootfs":{"type":"layers","diff_ids":["A","B"]},"history":[{"x":1}]}"#,
    );
    let config = Config::parse(text.as_bytes()).unwrap();
    assert_eq!(config.diff_ids(), [A.parse().unwrap(), B.parse().unwrap()]);
    assert_eq!(config.config.env, ["A=b c"]);
    assert_eq!(config.config.cmd, [""; 0]);
    assert_eq!(config.config.entrypoint, ["/x"]);
    assert_eq!((&*config.config.user, &*config.config.working_dir), ("1:2", "/w"));
    assert_eq!(config.config.labels["k"], "v");
    let error = config.diff_ids_of(3).unwrap_err();
    assert_eq!(error.to_string(), "the config has 2 diff ids, but the manifest has 3 layers");
    // Docker's "scratch" images, and the config of an artifact.
    let empty = Config::parse(br#"{"config":null,"rootfs":{"type":"layers","diff_ids":null}}"#);
    assert_eq!(empty.unwrap().diff_ids(), []);
    assert!(Config::parse(b"{}").is_err());
}

/// JSON can write a NUL byte, but the kernel ends a program's arguments and variables at it: execve(2).
#[test]
fn nul_bytes() {
    let check = |execution: &str, expected: &str| {
        let text = format!(r#"{{"config":{{{execution}}},"rootfs":{{"diff_ids":[]}}}}"#);
        let error = Config::parse(text.as_bytes()).unwrap_err().to_string();
        assert_eq!(error, format!("the config's {expected} contains a NUL byte"), "{text}");
    };
    check(r#""Env":["A=1","PASSWORD=se\u0000cret"]"#, r#"variable "PASSWORD""#);
    check(r#""Env":["A\u0000B=1"]"#, r#"variable "A\0B""#);
    check(r#""Env":["A\u0000"]"#, r#"variable "A\0""#);
    check(r#""Entrypoint":["/x","\u0000"]"#, "Entrypoint, argument 2");
    check(r#""Cmd":["sh\u0000"]"#, "Cmd, argument 1");
    check(r#""User":"0\u0000:1""#, "User");
    check(r#""WorkingDir":"/w\u0000""#, "WorkingDir");
    check(r#""StopSignal":"\u0000""#, "StopSignal");
    check(r#""Labels":{"k":"v\u0000"}"#, r#"label "k""#);
    check(r#""Labels":{"k\u0000":"v"}"#, r#"label "k\0""#);
    // Backslashes that are not an escape of JSON, and escapes of other bytes.
    let fine = br#"{"config":{"Env":["A=\\u0000\u0001"]},"rootfs":{"diff_ids":[]}}"#;
    assert_eq!(Config::parse(fine).unwrap().config.env, ["A=\\u0000\u{1}"]);
}

/// serde reads a struct also from an array, and a commit changes the document by the names of its fields.
#[test]
fn a_config_consists_of_objects() {
    let good = r#"{"rootfs":{"type":"layers","diff_ids":[]},"config":null}"#;
    assert!(Config::parse(good.as_bytes()).is_ok());
    for bad in [
        r#"{"rootfs":[[]]}"#,
        r#"{"rootfs":null}"#,
        r#"{"rootfs":{"diff_ids":[]},"config":[]}"#,
        r#"["amd64","linux","",{},{"diff_ids":[]}]"#,
        " [ ]",
    ] {
        let parsed = Config::parse(bad.as_bytes());
        assert!(matches!(parsed, Err(ManifestError::Json { .. })), "{bad}: {parsed:?}");
    }
}
