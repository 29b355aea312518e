//! Checks that only `cli` determines the user of the process, and passes it down: root of a user namespace is not
//! root of the host, and a service acts for other users.

use super::sources::sources;

/// Calls that determine the user of the process, or compare only a user id.
const QUESTIONS: [&str; 7] =
    ["geteuid", "getuid", "getegid", "getgid", "this_process", "is_root:", ".is_root()"];

/// The only file that may contain these calls.
const ASKED: &str = "crates/kernel/src/process/who.rs";

#[test]
fn who_we_are_is_an_argument_below_cli() {
    let sources = sources();
    let below = sources.iter().filter(|it| it.package != "cli");
    let found: Vec<_> = below
        .filter(|it| QUESTIONS.iter().any(|question| it.text.contains(question)))
        .map(|it| it.path.as_str())
        .collect();
    assert_eq!(found, [ASKED], "these are to be given a `kernel::process::Who`");
}

#[test]
fn cli_asks_once() {
    let sources = sources();
    let cli = sources.iter().filter(|it| it.package == "cli");
    let asks = |text: &str| QUESTIONS[..5].iter().map(|it| text.matches(it).count()).sum::<usize>();
    let found: Vec<_> =
        cli.map(|it| (it.path.as_str(), asks(&it.text))).filter(|it| it.1 > 0).collect();
    assert_eq!(found, [("crates/cli/src/session/context.rs", 1)], "a verb has `Context::who`");
}
