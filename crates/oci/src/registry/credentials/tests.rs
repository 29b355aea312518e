use super::*;

fn show(found: &Result<Option<Credential>, CredentialError>) -> String {
    match found {
        Ok(None) => "nothing".to_owned(),
        Ok(Some(Credential::Password { user, password })) => {
            format!("{user} {}", password.expose())
        }
        Ok(Some(Credential::Identity(token))) => format!("identity {}", token.expose()),
        Ok(Some(Credential::Bearer(token))) => format!("bearer {}", token.expose()),
        Err(error) => error.to_string(),
    }
}

fn keyring(files: &[PathBuf], helpers: &Path) -> Keyring {
    Keyring {
        given: None,
        files: files.to_vec(),
        helpers: vec![helpers.to_owned()],
        helper_timeout: Duration::from_secs(10),
    }
}

fn check(text: &str, host: &str, repository: &str, expect: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    std::fs::write(&path, text).unwrap();
    let found = keyring(&[path], folder.path()).find_credential(host, repository);
    let got = show(&found).replace(&folder.path().display().to_string(), "D");
    assert_eq!(got, expect, "{text} {host}/{repository}");
}

/// The `auth` values are from `printf 'USER:PASSWORD' | base64`.
#[test]
fn files() {
    let simple = r#"{"auths":{"ghcr.io":{"auth":"bWU6c2VjcmV0"}}}"#;
    check(simple, "ghcr.io", "a/b", "me secret");
    check(simple, "ghcr.io:443", "a/b", "nothing");
    check(simple, "a.ghcr.io", "a/b", "nothing");
    let hub = r#"{"auths":{"https://index.docker.io/v1/":{"auth":"bWU6c2VjcmV0"}}}"#;
    check(hub, "docker.io", "library/x", "me secret");
    check(hub, "registry-1.docker.io", "library/x", "me secret");
    check(
        r#"{"auths":{"docker.io":{"auth":"bWU6c2VjcmV0"}}}"#,
        "registry-1.docker.io",
        "x",
        "me secret",
    );
    check(r#"{"auths":{"https://a.io/v2/":{"auth":"bWU6YTpi"}}}"#, "a.io", "x", "me a:b");
    // containers-auth.json(5): the most specific key wins, and must end at a component of the name.
    let nested = r#"{"auths":{
        "a.io":{"username":"host","password":"1"},
        "a.io/team":{"username":"team","password":"2"},
        "a.io/team/app":{"username":"app","password":"3"}}}"#;
    check(nested, "a.io", "other", "host 1");
    check(nested, "a.io", "team/x", "team 2");
    check(nested, "a.io", "team/app", "app 3");
    check(nested, "a.io", "team/app2", "team 2");
    check(nested, "a.io", "teams", "host 1");
    check(
        r#"{"auths":{"a.io":{"auth":"bWU6eA==","identitytoken":"T"}}}"#,
        "a.io",
        "x",
        "identity T",
    );
    check(r#"{"auths":{"a.io":{"registrytoken":"T"}}}"#, "a.io", "x", "bearer T");
    check(r#"{"auths":{"a.io":{}}}"#, "a.io", "x", "nothing");
    check("{}", "a.io", "x", "nothing");
    check("", "a.io", "x", "nothing");
    check(r#"{"credsStore":""}"#, "a.io", "x", "nothing");
    check("{\n\"auths\": 7}", "a.io", "x", "D/config.json is malformed at line 2");
    let unreadable = "D/config.json has unreadable credentials for a.io";
    check(r#"{"auths":{"a.io":{"auth":"c2VjcmV0"}}}"#, "a.io", "x", unreadable);
    check(r#"{"auths":{"a.io":{"auth":"-secret-"}}}"#, "a.io", "x", unreadable);
    let helper =
        "the credential helper docker-credential-none, which D/config.json names, is not installed";
    check(r#"{"credsStore":"none"}"#, "a.io", "x", helper);
    let path = "the credential helper docker-credential-../../x, which D/config.json names, is not installed";
    check(r#"{"credsStore":"../../x"}"#, "a.io", "x", path);
}

#[test]
fn the_first_file_that_knows_decides() {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["none", "a", "b"].map(|name| folder.path().join(name));
    std::fs::write(&paths[1], r#"{"auths":{"a.io":{"username":"1","password":"x"}}}"#).unwrap();
    let second = r#"{"auths":{"a.io":{"username":"2","password":"x"},"b.io":{"username":"3","password":"x"}}}"#;
    std::fs::write(&paths[2], second).unwrap();
    let keyring = keyring(&paths, folder.path());
    assert_eq!(show(&keyring.find_credential("a.io", "x")), "1 x");
    assert_eq!(show(&keyring.find_credential("b.io", "x")), "3 x");
    let given = Keyring { given: Some(Credential::Bearer(Secret::new("T".to_owned()))), ..keyring };
    assert_eq!(show(&given.find_credential("b.io", "x")), "bearer T");
}

/// Checks the credentials from a helper that is a script, for the registry `a.io` or Docker Hub.
fn check_helper(script: &str, config: &str, host: &str, timeout: Duration, expect: &str) {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("docker-credential-test");
    testing::script(&program, &format!("#!/bin/sh\n{script}\n"));
    let path = folder.path().join("config.json");
    std::fs::write(&path, config).unwrap();
    let keyring = Keyring { helper_timeout: timeout, ..keyring(&[path], folder.path()) };
    let got = show(&keyring.find_credential(host, "x"))
        .replace(&folder.path().display().to_string(), "D");
    assert_eq!(got, expect, "{script}");
}

#[test]
fn helpers() {
    let long = Duration::from_secs(20);
    let store = r#"{"auths":{"a.io":{}},"credsStore":"test"}"#;
    let only = r#"{"credHelpers":{"a.io":"test"},"credsStore":"none"}"#;
    let answer = r#"read server; [ "$1" = get ] && echo "{\"ServerURL\":\"x\",\"Username\":\"me\",\"Secret\":\"for $server\"}""#;
    check_helper(answer, store, "a.io", long, "me for a.io");
    check_helper(answer, only, "a.io", long, "me for a.io");
    check_helper(answer, store, "registry-1.docker.io", long, "me for https://index.docker.io/v1/");
    let token = r#"echo '{"Username":"<token>","Secret":"T"}'"#;
    check_helper(token, store, "a.io", long, "identity T");
    let nothing = "echo 'credentials not found in native keychain'; exit 1";
    check_helper(nothing, store, "a.io", long, "nothing");
    let failed = "D/docker-credential-test failed (exit status: 3)";
    check_helper("echo secret; echo secret >&2; exit 3", store, "a.io", long, failed);
    let malformed = "D/docker-credential-test failed (its output is malformed)";
    check_helper("echo secret", store, "a.io", long, malformed);
    // The helper itself would take a day.
    let late = "D/docker-credential-test did not finish within 0.2 s";
    check_helper("exec sleep 86400", store, "a.io", Duration::from_millis(200), late);
    check_helper("sleep 3 & exit 0", store, "a.io", Duration::from_millis(200), late);
}

#[test]
fn nothing_shows_a_secret() {
    let secret = Secret::new("hunter2".to_owned());
    assert_eq!(format!("{secret} {secret:?}"), "*** ***");
    let credential = Credential::Password { user: "me".to_owned(), password: secret };
    assert_eq!(format!("{credential:?}"), "Password { user: \"me\", password: *** }");
}
