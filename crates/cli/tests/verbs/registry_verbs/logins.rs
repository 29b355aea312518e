//! `login` and `logout`, with Debian's docker-registry and a password.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::registry_verbs::registries::{place, start_with};
use crate::{Place, Ran};

/// The password, and its user's line in the form of crypt(3).
const PASSWORD: &str = "open-sesame";
const USERS: &str = "me:$2b$05$TYQndf3peGt.JQzdiNw8PuMddQE2xVcVXBHEcGw2DoSuW3noVNBl2\n";

/// Returns settings of a registry that has one user.
pub(crate) fn guarded(place: &Place) -> String {
    let users = place.path("htpasswd");
    std::fs::write(&users, USERS).unwrap();
    format!("auth: {{htpasswd: {{realm: x, path: \"{}\"}}}}\n", users.display())
}

/// Returns a command whose credentials are all in the folder of the place.
fn command(place: &Place, line: &str) -> Command {
    let arguments: Vec<&str> = line.split(' ').collect();
    let mut command = place.command(&arguments);
    command.env_remove("REGISTRY_AUTH_FILE").env("HOME", place.path("home"));
    command.env_remove("DOCKER_CONFIG").env_remove("XDG_CONFIG_HOME");
    command.env("XDG_RUNTIME_DIR", place.path("run"));
    command
}

pub(crate) fn run_with(place: &Place, line: &str, input: &str) -> Ran {
    let mut command = command(place, line);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that refuses its arguments does not read its input.
    let _unread = child.stdin.take().unwrap().write_all(input.as_bytes());
    let ran = Ran::from_output(&child.wait_with_output().unwrap());
    assert!(!ran.err.contains(PASSWORD) && !ran.out.contains(PASSWORD), "{ran:?}");
    // `printf me:open-sesame | base64`
    assert!(!ran.err.contains("bWU6b3") && !ran.out.contains("bWU6b3"), "{ran:?}");
    ran
}

#[test]
fn who_logs_in_may_push_and_pull_until_logging_out() {
    let place = place(1);
    let Some(daemon) = start_with(&place, &guarded(&place)) else { return };
    let host = &daemon.host;
    let file = place.path("run/containers/auth.json");
    let push = format!("push a:1 {host}/app:1");
    let refused = run_with(&place, &push, "");
    assert_eq!(refused.code, Some(4));
    assert!(refused.err.contains(&format!("quire login {host}")), "{}", refused.err);

    // Credentials that the registry rejects are not saved.
    let login = format!("--verbose --verbose login {host} -u me --password-stdin");
    for wrong in ["open-sesame2\n", "\n", ""] {
        let ran = run_with(&place, &login, wrong);
        let code = if ran.err.contains("refuses the credentials") { 4 } else { 2 };
        assert_eq!(ran.code, Some(code), "{}", ran.err);
        assert!(!file.exists());
    }
    let ran = run_with(&place, &login, "wrong");
    assert!(ran.err.contains("refuses the credentials"), "{}", ran.err);

    for input in ["open-sesame", "open-sesame\n", "open-sesame\r\n"] {
        let ran = run_with(&place, &login, input);
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        assert_eq!(ran.out, "Login Succeeded!\n", "{}", ran.err);
    }
    assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let pushed = run_with(&place, &push, "");
    assert_eq!(pushed.code, Some(0), "{}", pushed.err);
    // Podman and skopeo use the same file.
    if let Some(skopeo) = crate::program("skopeo") {
        let image = format!("docker://{host}/app:1");
        let mut command = Command::new(skopeo);
        command.args(["inspect", "--tls-verify=false", &image]);
        command.env("XDG_RUNTIME_DIR", place.path("run")).env_remove("REGISTRY_AUTH_FILE");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    } else {
        testing::skipped("skopeo is not installed");
    }
    let ran = run_with(&place, &format!("logout {host}"), "");
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert_eq!(run_with(&place, &format!("logout {host}"), "").code, Some(1));
    assert_eq!(run_with(&place, &push, "").code, Some(4));
    let ran = run_with(&place, "login -u me --password-stdin nonsense", "x");
    assert!(ran.err.contains("\"nonsense\" is not a registry"), "{}", ran.err);
    let ran = run_with(&place, &format!("login {host} --password-stdin"), "x");
    assert!(ran.err.contains("--username"), "{}", ran.err);
}

#[test]
fn a_registry_that_asks_nobody_checks_nothing() {
    let place = Place::new();
    place.tree("tree", "x");
    let Some(daemon) = start_with(&place, "") else { return };
    let ran = run_with(&place, &format!("login {} -u me --password-stdin", daemon.host), PASSWORD);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(ran.err.contains("was not checked"), "{}", ran.err);
}

/// Runs a command on a separate terminal of 80 columns, and answers its questions. Returns the terminal's output, and
/// whether the terminal still echoes.
pub(crate) fn on_a_terminal(place: &Place, line: &str, answers: &[(&str, &str)]) -> (String, bool) {
    on_a_terminal_of(80, place, line, answers)
}

/// Does the same on a terminal with this number of columns.
pub(crate) fn on_a_terminal_of(
    columns: u16,
    place: &Place,
    line: &str,
    answers: &[(&str, &str)],
) -> (String, bool) {
    let quire = command(place, line);
    let words = std::iter::once(quire.get_program()).chain(quire.get_args());
    let words: Vec<_> = words.map(|it| it.to_str().unwrap()).collect();
    let mut script = Command::new("script");
    // Ctrl-C also reaches the shell, which some shells do not survive without a trap. Libraries ignore the columns of a
    // terminal without rows.
    script.args([
        "-qec",
        &format!(
            "trap : INT; stty rows 24 cols {columns}; {}; echo ended with $?; stty",
            words.join(" ")
        ),
        "/dev/null",
    ]);
    for (name, value) in quire.get_envs() {
        match value {
            Some(value) => script.env(name, value),
            None => script.env_remove(name),
        };
    }
    script.env("TERM", "xterm");
    script.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut script = script.current_dir(place.folder.path()).spawn().unwrap();
    let (mut input, mut output) = (script.stdin.take().unwrap(), script.stdout.take().unwrap());
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(read @ 1..) = output.read(&mut bytes) {
            if sender.send(bytes[..read].to_vec()).is_err() {
                return;
            }
        }
    });
    let mut shown = String::new();
    let mut from = 0;
    let since = Instant::now();
    let see = |shown: &mut String| {
        assert!(since.elapsed() < Duration::from_secs(120), "{shown}");
        if let Ok(bytes) = receiver.recv_timeout(Duration::from_millis(50)) {
            shown.push_str(&String::from_utf8_lossy(&bytes));
        }
    };
    for (question, answer) in answers {
        while !shown[from..].contains(question) {
            see(&mut shown);
        }
        from = shown.len();
        input.write_all(answer.as_bytes()).unwrap();
    }
    while !shown.contains("speed ") {
        see(&mut shown);
    }
    drop(input);
    script.wait().unwrap();
    // `stty` prints only settings that differ from the defaults.
    let is_mute = shown.split_whitespace().any(|it| it == "-echo");
    (shown, !is_mute)
}

#[test]
fn a_password_is_asked_for_and_not_shown() {
    let place = Place::new();
    place.tree("tree", "x");
    if crate::program("script").is_none() {
        testing::skipped("script is not installed");
        return;
    }
    let Some(daemon) = start_with(&place, &guarded(&place)) else { return };
    let line = format!("login {}", daemon.host);
    let right = [("user for", "me\n"), ("password of me", "open-sesame\n")];
    let (shown, has_echo) = on_a_terminal(&place, &line, &right);
    assert!(shown.contains("Login Succeeded!") && shown.contains("ended with 0"), "{shown}");
    assert!(!shown.contains(PASSWORD) && has_echo, "{shown}");
    assert!(place.path("run/containers/auth.json").exists());
    // After Ctrl-C at the question, the terminal echoes input again.
    let (shown, has_echo) =
        on_a_terminal(&place, &line, &[("user for", "me\n"), ("password of", "\u{3}")]);
    assert!(shown.contains("cancelled") && shown.contains("ended with 2") && has_echo, "{shown}");
}
