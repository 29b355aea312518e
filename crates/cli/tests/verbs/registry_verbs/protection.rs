//! `--tls-verify`, and the options of `login` and `logout`, with Debian's docker-registry.

use std::net::TcpListener;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use testing::daemon::{Daemon, PROGRAM};

use crate::Place;
use crate::container_life::inherited::that_show;
use crate::registry_verbs::logins::{guarded, run_with};
use crate::registry_verbs::registries::{place, start_with};

/// Starts a registry that has a self-signed certificate, and one user.
fn start_with_tls(place: &Place) -> Option<Daemon> {
    let users = guarded(place);
    let (key, certificate) = (place.path("key.pem"), place.path("certificate.pem"));
    let made = testing::command("openssl")?
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"])
        .args(["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"])
        .arg("-keyout")
        .arg(&key)
        .arg("-out")
        .arg(&certificate)
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let daemon = Daemon::serve(place.folder.path(), |folder, host| {
        let text = format!(
            "version: 0.1\nlog: {{level: error, accesslog: {{disabled: true}}}}\n\
             storage: {{filesystem: {{rootdirectory: {}}}}}\n\
             http: {{addr: \"{host}\", tls: {{certificate: {}, key: {}}}}}\n{users}",
            folder.join("data").display(),
            certificate.display(),
            key.display()
        );
        std::fs::write(folder.join("registry.yml"), text)?;
        let mut command = Command::new(PROGRAM);
        command.arg("serve").arg(folder.join("registry.yml"));
        Ok(command)
    });
    let daemon = daemon.unwrap();
    if daemon.is_none() {
        testing::skipped(&format!("{PROGRAM} is not installed"));
    }
    daemon
}

#[test]
fn a_certificate_is_verified_unless_the_command_says_otherwise() {
    let place = place(1);
    let Some(daemon) = start_with_tls(&place) else { return };
    let host = &daemon.host;
    let file = place.path("run/containers/auth.json");
    let login = format!("login {host} -u me --password-stdin");
    for option in ["", " --tls-verify", " --tls-verify=true"] {
        let ran = run_with(&place, &format!("{login}{option}"), "open-sesame");
        assert_ne!(ran.code, Some(0), "{option}");
        assert!(!file.exists(), "{option}");
    }
    let ran = run_with(&place, &format!("{login} --tls-verify=false"), "open-sesame");
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "Login Succeeded!\n"), "{}", ran.err);
    let target = format!("{host}/app:1");
    assert_ne!(run_with(&place, &format!("push --tls-verify a:1 {target}"), "").code, Some(0));
    let ran = run_with(&place, &format!("push --tls-verify=false a:1 {target}"), "");
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert_ne!(run_with(&place, &format!("pull {target}"), "").code, Some(0));
    let ran = run_with(&place, &format!("pull --tls-verify=false {target}"), "");
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    // Services need settings in a file.
    for line in ["fsck --tls-verify=false", "serve --lazy --tls-verify=false"] {
        let ran = run_with(&place, line, "");
        assert!(ran.code != Some(0) && ran.err.contains("hosts.toml"), "{line}: {}", ran.err);
    }
    let ran = run_with(&place, &format!("pull --tls-verify=false --plain-http {target}"), "");
    assert!(ran.err.contains("cannot be used with"), "{}", ran.err);
}

/// As podman does, a command may use HTTP if it need not verify anything, and never otherwise.
#[test]
fn http_is_used_if_there_is_no_https() {
    let place = place(1);
    let Some(daemon) = start_with(&place, &guarded(&place)) else { return };
    let login = format!("login {} -u me --password-stdin", daemon.host);
    let ran = run_with(&place, &format!("{login} --tls-verify"), "open-sesame");
    assert_ne!(ran.code, Some(0), "{}", ran.out);
    let ran = run_with(&place, &format!("{login} --tls-verify=false"), "open-sesame");
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "Login Succeeded!\n"), "{}", ran.err);
    let target = format!("{}/app:1", daemon.host);
    let ran = run_with(&place, &format!("push --tls-verify=false a:1 {target}"), "");
    assert_eq!(ran.code, Some(0), "{}", ran.err);
}

/// The texts are those of podman.
#[test]
fn saved_credentials_are_shown_and_removed() {
    let place = place(1);
    let Some(daemon) = start_with(&place, &guarded(&place)) else { return };
    let host = &daemon.host;
    let ran = run_with(&place, &format!("login {host} --get-login"), "");
    assert!(ran.code != Some(0) && ran.err.contains("not logged into"), "{}", ran.err);
    let login = |option: &str| {
        let line = format!("login {host} -u me -p open-sesame{option}");
        let ran = run_with(&place, &line, "");
        assert_eq!((ran.code, ran.out.as_str()), (Some(0), "Login Succeeded!\n"), "{}", ran.err);
    };
    let auths = |name: &str| -> Value {
        let text = std::fs::read_to_string(place.path(name)).unwrap();
        serde_json::from_str::<Value>(&text).unwrap()["auths"].clone()
    };
    // `printf me:open-sesame | base64`
    let saved = json!({host.as_str(): {"auth": "bWU6b3Blbi1zZXNhbWU="}});
    login("");
    assert_eq!(auths("run/containers/auth.json"), saved);
    assert_eq!(run_with(&place, &format!("login {host} --get-login"), "").out, "me\n");
    let ran = run_with(&place, &format!("logout {host}"), "");
    assert_eq!(ran.out, format!("Removed login credentials for {host}\n"), "{}", ran.err);
    assert_eq!(auths("run/containers/auth.json"), json!({}));

    for (option, name) in [("--authfile", "auth.json"), ("--compat-auth-file", "config.json")] {
        let option = format!(" {option} {}", place.path(name).display());
        login(&option);
        assert_eq!(auths(name), saved);
        let ran = run_with(&place, &format!("logout{option} {host}"), "");
        assert_eq!((ran.code, auths(name)), (Some(0), json!({})), "{}", ran.err);
    }
    for verb in ["login", "logout"] {
        let line = format!("{verb} --authfile a --compat-auth-file a localhost:5000");
        let ran = run_with(&place, &line, "");
        let expect = "options for paths to the credential file and to the Docker-compatible credential file can not";
        assert!(ran.code != Some(0) && ran.err.contains(expect), "{}", ran.err);
    }
    login("");
    let ran = run_with(&place, "logout --all", "");
    assert_eq!(ran.out, "Removed login credentials for all registries\n", "{}", ran.err);
    assert_eq!(auths("run/containers/auth.json"), json!({}));
}

/// Every user of the host can read the command line of a process while it waits for the registry. Source:
/// proc_pid_cmdline(5).
#[test]
fn a_password_is_not_in_the_list_of_processes() {
    let place = Place::new();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let host = silent.local_addr().unwrap().to_string();
    let secret = format!("rosebud{}login", std::process::id());
    let mut login = place.command(&["login", &host, "-u", "me", "--password", &secret]);
    login.env("HOME", place.path("home")).env("XDG_RUNTIME_DIR", place.path("run"));
    let mut login = login.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let connection = silent.accept().unwrap();
    let shown = that_show("cmdline", &secret, None);
    let waits = login.try_wait().unwrap().is_none();
    login.kill().unwrap();
    login.wait().unwrap();
    drop(connection);
    assert!(waits, "it waits for the registry");
    assert_eq!(shown, Vec::<String>::new());
}
