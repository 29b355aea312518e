//! Help, completions, man pages, and mistakes on the command line.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use crate::{Place, Ran, is_root, write};

#[test]
fn every_verb_has_help() {
    let place = Place::new();
    let help = place.out("help");
    for group in ["Images:", "Containers:", "Store:", "Tools:"] {
        assert!(help.lines().any(|line| line == group), "{group} {help}");
    }
    let lines = help.lines().take_while(|line| *line != "Options:");
    let verbs: Vec<(&str, &str)> = lines
        .filter(|line| line.starts_with("  "))
        .filter_map(|line| line.trim_start().split_once(' '))
        .collect();
    assert!(verbs.len() > 15, "{help}");
    for (verb, summary) in verbs {
        let text = place.out(&format!("help {verb}"));
        assert!(text.contains("Usage: quire"), "{verb}: {text}");
        // The help of options that several verbs share must not replace the title of a verb.
        let title = text.lines().next().unwrap_or_default();
        let summary = summary.trim_start();
        // An alias follows the title, or the title was cut.
        let is_own =
            !title.is_empty() && (summary.starts_with(title) || title.starts_with(summary));
        assert!(verb == "help" || is_own, "{verb}: {title}, {summary}");
        if verb != "help" {
            assert!(text.contains(&format!("Examples:\n  quire {verb}")), "{verb}: {text}");
        }
    }
}

/// clap's `help` has no options.
#[test]
fn help_has_help() {
    let place = Place::new();
    let help = place.out("help help");
    assert!(help.starts_with("Show the help of a command\n\nUsage: quire help"), "{help}");
    for line in ["help -h", "help --help", "--quiet help -h", "help -h --help"] {
        assert_eq!(place.out(line), help, "{line}");
    }
    for line in ["help run -h", "help run --help", "help --help run"] {
        assert_eq!(place.out(line), place.out("help run"), "{line}");
    }
    for line in ["help -x", "help nothing -h", "--bogus help -h"] {
        let ran = place.run(line);
        assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""), "{line}");
    }
}

#[test]
fn man_pages_and_completions_are_written() {
    let place = Place::new();
    std::fs::create_dir(place.path("man")).unwrap();
    place.out("man man");
    let page = std::fs::read_to_string(place.path("man/man1/quire-import.1")).unwrap();
    assert!(page.contains(".TH") && page.contains("quire import oci:"), "{page}");
    let mut pages = vec!["man5/quire-policy.toml.5", "man8/mount.quire.8", "man1/mkcomposefs.1"];
    if cfg!(feature = "registry") {
        pages.push("man5/quire-hosts.toml.5");
    }
    for page in pages {
        assert!(place.path(&format!("man/{page}")).exists(), "{page}");
    }
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        assert!(place.out(&format!("completions {shell}")).contains("quire"));
    }
}

/// Returns what a script of completions is offered for a command line, of which the last word may be empty.
fn offered(place: &Place, shell: &str, line: &str) -> String {
    let words: Vec<_> = ["completions", shell, "--"].into_iter().chain(line.split(' ')).collect();
    let ran = Ran::from_output(&place.command(&words).output().unwrap());
    assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""), "{line}");
    ran.out
}

#[test]
fn completion_offers_images_and_no_hidden_options() {
    let place = Place::new();
    // Without a store, completion makes none, and prints no error.
    for line in ["run ", "exec ", "rmi a"] {
        assert_eq!(offered(&place, "bash", line), "", "{line}");
    }
    assert!(!place.path("store").exists());
    let tree = place.tree("tree", "x");
    place.out(&format!("import --quiet dir:{} debian:12", tree.display()));
    place.out("tag debian:12 other");
    for line in ["run d", "run -it --name a d", "rmi other d", "tag d", "push d", "show d"] {
        assert_eq!(offered(&place, "bash", line), "debian:12\n", "{line}");
    }
    assert_eq!(offered(&place, "zsh", "run d"), "debian\\:12\n");
    assert_eq!(offered(&place, "fish", "run "), "debian:12\nother:latest\n");
    assert_eq!(offered(&place, "bash", "run debian:12 "), "");
    for shell in ["bash", "zsh", "fish"] {
        for (line, hidden) in [("run --j", "--json"), ("completions bash --w", "words")] {
            assert!(!offered(&place, shell, line).contains(hidden), "{shell}: {line}");
        }
        assert!(offered(&place, shell, "run --na").contains("--name"), "{shell}");
    }
}

/// Runs the script of bash as bash does at the tab key.
#[test]
fn completion_works_in_bash() {
    let Some(bash) = testing::program("bash") else { return };
    let place = Place::new();
    let tree = place.tree("tree", "x");
    place.out(&format!("import --quiet dir:{} debian:12", tree.display()));
    let check = |line: &str, expect: &str| {
        let script = format!(
            "PATH={}:$PATH; source <(quire completions bash); COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; \
            compopt() {{ :; }}; _quire quire; echo \"${{COMPREPLY[@]}}\"",
            std::path::Path::new(env!("CARGO_BIN_EXE_quire")).parent().unwrap().display()
        );
        let mut bash = Command::new(&bash);
        bash.args(["-c", &script]).env("QUIRE_STORE", place.path("store"));
        let ran = Ran::from_output(&bash.output().unwrap());
        assert_eq!((ran.out.trim(), ran.err.as_str()), (expect, ""), "{line}");
    };
    check("quire rm", "rmi rm");
    check("quire run d", "debian:12");
    check("sudo quire run d", "debian:12");
    check("quire run debian:", "12");
    check("quire run --pull=al", "always");
}

/// Options of the program may come first: `Place::run` always gives --store.
#[test]
fn help_does_not_depend_on_global_options() {
    let place = Place::new();
    let alone = |verb: &str, asked: &str| {
        let mut quire = std::process::Command::new(env!("CARGO_BIN_EXE_quire"));
        crate::Ran::from_output(&quire.args([verb, asked]).output().unwrap()).out
    };
    let printed = |line: &str| {
        let ran = place.run(line);
        assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""), "{line}");
        ran.out
    };
    for verb in ["run", "images", "exec", "pull", "bundle"] {
        for asked in ["-h", "--help"] {
            let expect = alone(verb, asked);
            assert!(asked == "--help" || expect.lines().count() <= 60, "{verb}");
            for before in ["", "--json ", "--image-store x ", "--image-store=x --quiet "] {
                assert!(printed(&format!("{before}{verb} {asked}")) == expect, "{before}{verb}");
            }
        }
    }
    let list = printed("-h");
    assert!(list.lines().count() <= 60);
    for line in ["-h run", "--json -h", "--image-store=x -h images"] {
        assert!(printed(line) == list, "{line}");
    }
}

#[test]
fn mistakes_are_told_with_what_was_meant() {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    place.out(&format!("import dir:{} debian", tree.display()));
    let cases = [
        ("imoprt x", 2, "'import'"),
        ("import ./x:y", 2, "is not a source"),
        ("import ./tree", 2, "did you mean dir:./tree?"),
        ("import tree/etc/long", 2, "did you mean tar:tree/etc/long, or docker-archive:"),
        ("import ./a.dump", 2, "did you mean dump:./a.dump?"),
        ("build - image", 2, "did you mean tar:- for"),
        ("import docker://debian", 2, "`quire pull` fetches"),
        ("import oci-archive:x.tar", 2, "unpack it"),
        ("import dir:/no/such/place", 2, "/no/such/place"),
        ("show debain", 3, "did you mean debian:latest?"),
        ("cat debian:/etc/none", 2, "the image has no \"/etc/none\""),
        ("cat debian:/etc", 2, "is not a regular file"),
        ("tag debian Not/A/Name!", 2, "is not an image name"),
        ("import ocii:tree", 2, "did you mean oci:tree?"),
        ("import bar:1", 2, "did you mean tar:1, or `quire pull bar:1`?"),
        ("import /tmp/nosuch.tar", 2, "the file /tmp/nosuch.tar does not exist"),
        ("import alpine.tar.gz", 2, "the file alpine.tar.gz does not exist"),
        ("import x.bad", 2, "the file x.bad does not exist"),
        (
            "rm nothing",
            1,
            "there is no container \"nothing\"\n  `quire ps --all` lists all containers\n",
        ),
        (
            "rm debian",
            1,
            "  debian:latest is an image: `quire rmi debian:latest` removes its name\n",
        ),
        ("rmi debain", 3, "did you mean debian:latest?\n"),
        (
            "diff debian",
            2,
            "quire: debian is an image, and diff compares two: give another image, or a \
             container\n",
        ),
        (
            "export debian tar:nowhere/x.tar",
            2,
            "\"nowhere\" does not exist: `mkdir -p 'nowhere'` makes it",
        ),
        ("import sha256:43eefd", 2, "dump:FILE, erofs:FILE or disk:FILE\n"),
        ("umount .", 2, "nothing is mounted"),
        ("ls debian:etc", 2, "did you mean debian:/etc?"),
        ("tree -L 0 debian", 2, "must be greater than 0"),
        ("mount debian nowhere", 2, "mkdir -p 'nowhere'"),
        ("mount debian tree/etc/long", 2, "is not a directory"),
        ("man nowhere", 2, "mkdir -p 'nowhere'"),
        ("import --skip-xattrs --user-xattrs dir:tree", 2, "cannot be used with"),
        ("build dir:tree nowhere/image", 2, "mkdir -p 'nowhere'"),
        ("build dir:tree tree", 2, "is a directory"),
        ("build dir:tree /dev/null", 2, "is not a regular file"),
        ("cat --json debian:/etc/long", 2, "--json"),
        ("dump --json debian", 2, "--json"),
        ("dump debian:/etc", 2, "whole images"),
        ("diff debian:/etc debian:/usr", 2, "the same path"),
        ("diff debian:/none debian:/none", 2, "neither image has"),
        ("build --json dir:tree -", 2, "--json"),
    ];
    for (line, code, text) in cases {
        let ran = place.run(line);
        assert_eq!(
            ran.code,
            if code == 2 { ran.failure() } else { Some(code) },
            "{line}: {}",
            ran.err
        );
        assert!(ran.err.contains(text), "{line}: {}", ran.err);
        assert!(!ran.err.contains("panicked"), "{line}: {}", ran.err);
        let names_registry = line.starts_with("import") && !text.contains("quire pull");
        assert!(!names_registry || !ran.err.contains("quire pull"), "{line}: {}", ran.err);
    }
}

/// Environment variables are not part of a usage.
#[test]
fn usage_does_not_depend_on_what_was_given() {
    let place = Place::new();
    let usage =
        |text: &str| text.lines().find(|line| line.starts_with("Usage: ")).unwrap().to_owned();
    let run = |arguments: &[&str]| {
        let mut command = place.command(arguments);
        Ran::from_output(&command.env("QUIRE_SEAL", "verity").output().unwrap())
    };
    // If the value of an environment variable is invalid, the error names the variable and not the option.
    let seal = |arguments: &[&str]| {
        Ran::from_output(&place.command(arguments).env("QUIRE_SEAL", "nonsense").output().unwrap())
            .err
    };
    let said = seal(&["images"]);
    assert!(said.contains("'nonsense' for 'QUIRE_SEAL'") && !said.contains("--seal"), "{said}");
    let said = seal(&["images", "--seal=other"]);
    assert!(said.contains("'other' for '--seal <HOW>'"), "{said}");
    let ran = run(&[]);
    assert_eq!(ran.code, Some(2), "{}", ran.err);
    assert!(ran.err.contains("\nImages:\n") && ran.err.contains("\nTools:\n"), "{}", ran.err);
    for line in ["tag a", "tag a b c", "tag --bogus a b", "run", "run --quiet --bogus"] {
        let arguments: Vec<&str> = line.split(' ').collect();
        let ran = run(&arguments);
        assert_ne!(ran.code, Some(0), "{line}");
        let help = place.out(&format!("help {}", arguments[0]));
        assert_eq!(usage(&ran.err), usage(&help), "{line}");
    }
}

#[test]
fn an_image_that_is_not_here_may_be_pulled() {
    let place = Place::new();
    place.tree("tree", "x");
    place.out("import --quiet dir:tree debian");
    let id = place.out("images -q");
    let list = "`quire images` lists all images";
    let pull = |name| match cfg!(feature = "registry") {
        true => format!("`quire pull {name}` fetches it from a registry; {list}"),
        false => list.to_owned(),
    };
    let meant = "did you mean debian:latest?";
    let pull_or_meant = match cfg!(feature = "registry") {
        true => format!("{meant} If not, `quire pull debain` fetches debain from a registry"),
        false => meant.to_owned(),
    };
    let of_id = format!("an image id needs at least 6 digits: did you mean {}?", id.trim());
    let cases = [
        ("run --pull never fedora:42", 125, pull("fedora:42")),
        ("mount fedora tree", 3, pull("fedora")),
        ("ls fedora", 3, pull("fedora")),
        ("bundle ghcr.io/owner/app:1 b", 3, pull("ghcr.io/owner/app:1")),
        ("show debain", 3, pull_or_meant),
        ("bundle 0123456789 b", 3, list.to_owned()),
        ("show sha256:43eefd", 3, list.to_owned()),
        ("show alpine.tar.gz", 3, list.to_owned()),
        ("show ghcr.io/owner/app.tar:1", 3, list.to_owned()),
        ("show oci:x", 3, list.to_owned()),
        ("show Not/A/Name!", 3, list.to_owned()),
        ("rmi fedora", 3, list.to_owned()),
        (&format!("show {}", &id[..4]), 3, of_id),
    ];
    for (line, code, hint) in &cases {
        let ran = place.run(line);
        assert_eq!(ran.code, Some(*code), "{line}: {}", ran.err);
        let said = ran.err.lines().last().unwrap().trim();
        assert_eq!(said, hint, "{line}: {}", ran.err);
    }
    let ran = place.run(&format!("rmi {}", &id[..4]));
    assert!(ran.err.contains("needs at least 6 digits"), "{}", ran.err);
    assert!(place.out(&format!("show {}", &id[..6])).contains("debian:latest"));
    assert!(place.out("help show").contains("(6 or more)"));
}

#[cfg(feature = "registry")]
#[test]
fn certificates_that_are_not_there_are_missed() {
    let place = Place::new();
    place.tree("tree", "x");
    place.out("import --quiet dir:tree a");
    place.out("export a tar:a.tar");
    place.out("import --quiet tar:a.tar a");
    for line in [
        "pull localhost:1/x",
        "push a localhost:1/x",
        "referrers localhost:1/x",
        "login -u x --password-stdin localhost:1",
        "logout localhost:1",
    ] {
        let ran = place.run(&format!("{line} --certs-dir nosuch"));
        assert_eq!(ran.code, Some(2), "{line}: {}", ran.err);
        let said = "quire: --certs-dir nosuch: cannot read the directory: No such file";
        assert!(ran.err.contains(said), "{line}: {}", ran.err);
    }
}

#[test]
fn one_thing_is_no_plural() {
    let place = Place::new();
    std::fs::create_dir_all(place.path("tree/etc")).unwrap();
    let check = |line: &str, text: &str| {
        let out = place.out(line);
        assert!(out.contains(text), "{line}: {out}");
    };
    check("import dir:tree/etc a", "\n1 inode\n");
    write(&place.path("tree/etc/long"), &[b'x'; 100], 0o644);
    check("import dir:tree b", "\n3 inodes; 1 object added");
    check("tree b", "\n1 directory, 1 file\n");
    check("tree a", "\n0 directories, 0 files\n");
    check("verify a", "sound: 1 file,");
    place.out("export b tar:b.tar");
    check("import tar:b.tar c", "\n1 layer, 0 already in the store\n");
    check("export c oci:layout", "\n1 layer; 3 blobs added");
}

#[test]
fn who_may_not_is_told_who_may() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let tree = place.tree("tree", "x");
    place.out(&format!("import dir:{} a", tree.display()));
    // Copy the program to a path where another user can execute it.
    let program = place.path("quire");
    std::fs::copy(env!("CARGO_BIN_EXE_quire"), &program).unwrap();
    let anyone = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(place.folder.path(), anyone).unwrap();
    std::fs::create_dir(place.path("own")).unwrap();
    std::os::unix::fs::chown(place.path("own"), Some(65534), Some(65534)).unwrap();
    let check = |store: &str, arguments: &[&str], hint: &str| {
        let mut command = Command::new(&program);
        command.arg("--store").arg(place.path(store)).args(arguments);
        let output = command.uid(65534).gid(65534).current_dir("/").output().unwrap();
        let ran = Ran::from_output(&output);
        let code = if arguments[0] == "rm" { 125 } else { 2 };
        assert_eq!(ran.code, Some(code), "{}", ran.err);
        assert!(ran.err.contains(hint), "{}", ran.err);
        // Root does not use stores of other users.
        assert!(!ran.err.contains("--store /"), "{}", ran.err);
    };
    check("store", &["rm", "a"], "--store DIR for a store that belongs");
    std::fs::create_dir(place.path("secret")).unwrap();
    let root_alone = std::fs::Permissions::from_mode(0o700);
    std::fs::set_permissions(place.path("secret"), root_alone).unwrap();
    let secret = format!("dir:{}", place.path("secret").display());
    check("own/store", &["import", &secret], "use sudo");
}

#[test]
fn a_store_that_is_not_there_is_not_made_by_looking() {
    let place = Place::new();
    let ran = place.run("tag a b");
    assert_eq!(ran.code, Some(3));
    assert!(ran.err.contains("quire import"), "{}", ran.err);
    place.out("images");
    assert!(!place.path("store").exists());
}

#[test]
fn doctor_answers_everywhere() {
    let place = Place::new();
    let text = place.out("doctor");
    assert!(text.contains("kernel"));
    let cgroups = text.lines().find_map(|line| line.strip_prefix("  cgroups")).unwrap().trim();
    assert!(cgroups.starts_with("version ") || cgroups.starts_with("not mounted"), "{cgroups}");
    let json: serde_json::Value = serde_json::from_str(&place.out("doctor --json")).unwrap();
    assert!(json["features"].as_array().is_some_and(|it| it.len() >= 8), "{json}");
    let verdict = |text: &str| text.lines().last().unwrap_or_default().to_owned();
    let works = json["works"].as_bool().unwrap();
    assert_eq!(verdict(&text).starts_with("✓ all configured features work"), works, "{text}");
    assert_eq!(json["problems"].as_array().unwrap().is_empty(), works, "{json}");
    // A cross stands before each feature that this host lacks, so the last line names them.
    for feature in json["features"].as_array().unwrap() {
        let name = feature["feature"].as_str().unwrap();
        let is_named = verdict(&text)
            .split("missing on this host: ")
            .nth(1)
            .is_some_and(|it| it.split(", ").any(|it| it == name));
        assert_eq!(is_named, feature["can"] == "no", "{name}: {text}");
    }

    // Without a runtime, containers cannot start, and a policy that cannot be read refuses all images.
    write(&place.path("policy.toml"), b"defualt = 1", 0o644);
    let mut command = place.command(&["doctor"]);
    let out = command.env("PATH", "/nonexistent").env("QUIRE_POLICY", place.path("policy.toml"));
    let ran = Ran::from_output(&out.output().unwrap());
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let last = verdict(&ran.out);
    assert!(last.starts_with("✗ some features do not work: see "), "{last}");
    assert!(last.contains("runtime") && last.contains("policy"), "{last}");
    assert!(ran.out.contains("\n✗ runtime        no OCI runtime in PATH"), "{}", ran.out);
}

#[test]
fn exit_codes_are_in_help_and_man_pages() {
    let place = Place::new();
    std::fs::create_dir(place.path("man")).unwrap();
    place.out("man man");
    for (verb, text, offers_json) in [
        ("fsck", "1 a negative result (damage, a difference)", true),
        ("rm", "or is in use; 125 any other failure", true),
        ("import", "2 an error", true),
        ("run", "125 Quire or the runtime failed", false),
        ("cat", "2 an error", false),
    ] {
        let help = place.out(&format!("help {verb}"));
        assert!(help.contains(text), "{verb}: {help}");
        assert_eq!(help.contains("--json"), offers_json, "{verb}: {help}");
        let page =
            std::fs::read_to_string(place.path(&format!("man/man1/quire-{verb}.1"))).unwrap();
        assert!(page.contains(text), "{verb}: {page}");
    }
}

#[test]
fn only_run_has_the_codes_of_run() {
    let place = Place::new();
    let check = |line: &str, code| assert_eq!(place.run(line).code, Some(code), "{line}");
    check("run --bogus", 125);
    check("--verbose run --bogus", 125);
    check("images --bogus", 2);
    check("--store run images --bogus", 2);
    check("--policy run images --bogus", 2);
    check("show run --bogus", 2);
    check("--store images run --bogus", 125);
    check("run --json a", 125);
    check("--json run a", 125);
    check("ps --bogus", 125);
    check("rm --bogus", 125);
    check("rm nosuch", 1);
    check("inspect nosuch", 125);
    check("volume rm nosuch", 1);
    check("network rm nosuch", 1);
    check("volume nosuch", 125);
}

#[test]
fn what_cannot_be_written_is_a_failure() {
    let place = Place::new();
    for line in ["completions bash", "--help", "--version", "help run"] {
        let full = std::fs::File::create("/dev/full").unwrap();
        let arguments: Vec<&str> = line.split(' ').collect();
        let output = place.command(&arguments).stdout(full).output().unwrap();
        let ran = Ran::from_output(&output);
        assert_eq!(ran.code, Some(6), "{line}: {}", ran.err);
        assert!(ran.err.contains("No space left"), "{line}: {}", ran.err);
    }
    place.tree("tree", "x");
    place.out("import --quiet dir:tree a");
    let full = std::fs::File::create("/dev/full").unwrap();
    let ran = Ran::from_output(&place.command(&["images"]).stdout(full).output().unwrap());
    let said = "quire: cannot write to standard output: No space left on device (os error 28)\n";
    // A hint about the store would not help.
    assert_eq!((ran.code, ran.err.as_str()), (Some(6), said));
}

#[test]
fn nothing_is_said_of_what_was_not_done() {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    place.out(&format!("import --quiet dir:{} a", tree.display()));
    let ran = place.run("rm -f nosuch");
    assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""));
    let ran = place.run("rmi -f nosuch a");
    assert!(ran.err.contains("names removed"), "{}", ran.err);
    std::fs::create_dir(place.path("empty")).unwrap();
    write(&place.path("empty/oci-layout"), br#"{"imageLayoutVersion":"1.0.0"}"#, 0o644);
    write(&place.path("empty/index.json"), br#"{"schemaVersion":2,"manifests":[]}"#, 0o644);
    for line in ["import oci:empty", "import oci:empty:tag"] {
        let ran = place.run(line);
        assert_eq!(ran.code, Some(2), "{}", ran.err);
        assert!(ran.err.contains("has no images"), "{}", ran.err);
    }
}
