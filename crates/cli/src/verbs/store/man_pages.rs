//! The man pages: of Quire, its verbs, its other names, and its configuration files.

use clap::{Arg, Command};
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, italic, roman};

use super::man_markdown;
use crate::composefs;
use crate::verbs::exit_codes::ExitCodes;
use crate::verbs::mounts::mount_helper;
use crate::verbs::{VERBS, VerbRow, help};

/// A page, and where it belongs.
#[derive(Debug)]
pub(crate) struct ManPage {
    pub(crate) name: String,
    pub(crate) section: u8,
    /// In the language of man(7).
    pub(crate) text: String,
}

/// Files of all commands.
const FILES: [(&str, &str); 3] = [
    ("/var/lib/quire", "The store of root."),
    ("$XDG_DATA_HOME/quire, else ~/.local/share/quire", "The store of another user."),
    (
        "/etc/quire/policy.toml, $XDG_CONFIG_HOME/quire/policy.toml",
        "Policies: which images may be used; see quire-policy.toml(5).",
    ),
];
/// Files of some verbs.
const FILES_OF_VERBS: [(&[&str], &str, &str); 4] = [
    (
        &["run", "create"],
        "/etc/quire/run.toml, $XDG_CONFIG_HOME/quire/run.toml",
        "Defaults of options; see quire-run.toml(5).",
    ),
    (
        &["serve", "doctor", "ps", "run", "mount"],
        "/etc/quire/serve.toml",
        "Settings of the services; see quire-serve.toml(5).",
    ),
    (
        &[
            "pull",
            "push",
            "login",
            "logout",
            "referrers",
            "run",
            "bundle",
            "mount",
            "index",
            "serve",
        ],
        "/etc/quire/certs.d/HOST/hosts.toml",
        "Mirrors and certificates of a registry; see quire-hosts.toml(5).",
    ),
    (
        &["run", "bundle"],
        "/etc/subuid, /etc/subgid",
        "Users of the host that a user's containers may have; see subuid(5).",
    ),
];

/// Variables without an option.
const VARIABLES: [(&str, &str); 4] = [
    ("QUIRE_LOG", "The level of the log, such as debug, instead of --verbose and --quiet."),
    ("COSIGN_PASSWORD", "The passphrase of the private key of sign and push."),
    ("XDG_DATA_HOME, XDG_CONFIG_HOME", "Directories of a user's store and policy."),
    ("HTTPS_PROXY, HTTP_PROXY, NO_PROXY", "The proxy for registries."),
];

/// Returns all pages.
pub(crate) fn pages() -> Vec<ManPage> {
    let command = help::explained();
    let mut pages = vec![whole(&command)];
    let verbs = VERBS.iter().filter_map(|row| Some(verb(row, command.find_subcommand(row.name)?)));
    pages.extend(verbs);
    pages.extend(composefs::usages().map(|(name, usage)| {
        let section = if name.starts_with("mount.") { 8 } else { 1 };
        let other = if section == 8 { "mount(8), fstab(5)" } else { "mount.composefs(8)" };
        tool(name, section, about_tool(name), usage, &format!("quire(1), {other}"))
    }));
    let others = "quire-mount(1), mount(8), fstab(5), quire-policy.toml(5)";
    let usage = mount_helper::usage();
    pages.push(tool("mount.quire", 8, "mount an image of Quire for mount(8)", &usage, others));
    pages.push(policy());
    #[cfg(feature = "registry")]
    pages.push(tool(
        "quire-image-verifier",
        8,
        "decide by Quire's policies which images containerd pulls",
        crate::verbs::images::registry::image_verifier::MANUAL,
        "quire(1), quire-policy.toml(5), quire-hosts.toml(5)",
    ));
    #[cfg(feature = "registry")]
    pages.push(hosts());
    #[cfg(feature = "serve")]
    pages.push(run_defaults());
    #[cfg(feature = "serve")]
    pages.push(settings());
    pages
}

fn about_tool(name: &str) -> &'static str {
    match name {
        "mkcomposefs" => "make a composefs image",
        "composefs-info" => "show what composefs images have",
        "composefs-dump" => "read a composefs image and write it again",
        _ => "mount a composefs image",
    }
}

/// A page that is being written.
struct Page {
    name: String,
    section: u8,
    text: String,
}

impl Page {
    fn new(name: &str, section: u8, about: &str) -> Self {
        let mut page = Self { name: name.to_owned(), section, text: String::new() };
        let version = format!("Quire {}", env!("CARGO_PKG_VERSION"));
        page.add(|roff| {
            let section = section.to_string();
            roff.control("TH", [name, section.as_str(), "", version.as_str(), "Quire"]);
            roff.control("SH", ["NAME"]);
            roff.text([roman(format!("{name} - {about}"))]);
        });
        page
    }

    fn add(&mut self, write: impl FnOnce(&mut Roff)) {
        let mut roff = Roff::new();
        write(&mut roff);
        self.append(&roff.render());
    }

    /// Appends text of the `roff` crate, which defines the apostrophe each time.
    fn append(&mut self, text: &str) {
        let is_first = self.text.is_empty();
        for line in text.lines() {
            if is_first || !line.starts_with(".ie \\n(.g") && !line.starts_with(".el .ds Aq") {
                self.text += line;
                self.text.push('\n');
            }
        }
    }

    fn paragraphs(&mut self, heading: &str, text: &str) {
        self.add(|roff| {
            roff.control("SH", [heading]);
            for paragraph in text.split("\n\n") {
                roff.control("PP", []);
                roff.text(paragraph.lines().map(|it| roman(it.trim())).collect::<Vec<_>>());
            }
        });
    }

    fn table(&mut self, heading: &str, rows: &[(String, String)]) {
        self.add(|roff| {
            roff.control("SH", [heading]);
            for (title, text) in rows {
                roff.control("TP", []);
                roff.text([bold(title)]);
                roff.text([roman(text)]);
            }
        });
    }

    fn code(&mut self, heading: &str, text: &str) {
        self.add(|roff| {
            roff.control("SH", [heading]);
            man_markdown::code(roff, text.lines());
        });
    }

    fn finish(mut self, see_also: &str) -> ManPage {
        self.paragraphs("SEE ALSO", see_also);
        ManPage { name: self.name, section: self.section, text: self.text }
    }
}

fn owned(rows: impl IntoIterator<Item = (&'static str, &'static str)>) -> Vec<(String, String)> {
    rows.into_iter().map(|(a, b)| (a.to_owned(), b.to_owned())).collect()
}

/// Returns quire(1).
fn whole(command: &Command) -> ManPage {
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let mut page = Page::new("quire", 1, about.trim_end_matches('.'));
    page.add(|roff| {
        roff.control("SH", ["SYNOPSIS"]);
        let mut line = vec![bold("quire")];
        line.extend(command.get_arguments().filter(|it| it.is_global_set()).flat_map(synopsis));
        line.extend([roman(" "), italic("COMMAND"), roman(" […]")]);
        roff.text(line);
    });
    let long = command.get_long_about().map(ToString::to_string).unwrap_or_default();
    page.paragraphs("DESCRIPTION", &long);
    let mut group = "";
    for row in VERBS {
        page.add(|roff| {
            if group.is_empty() {
                roff.control("SH", ["COMMANDS"]);
            }
            if row.group != group {
                roff.control("SS", [row.group]);
            }
            roff.control("TP", []);
            roff.text([bold(format!("quire-{}", row.name)), roman("(1)")]);
            roff.text([roman(row.about)]);
        });
        group = row.group;
    }
    options(&mut page, command);
    page.paragraphs("EXIT STATUS", &without_title(ExitCodes::Kinds.text()));
    let mut variables = variables(command);
    variables.extend(owned(VARIABLES));
    page.table("ENVIRONMENT", &variables);
    let of_verbs = FILES_OF_VERBS.map(|(_, file, about)| (file, about));
    page.table("FILES", &owned(FILES.into_iter().chain(of_verbs)));
    page.finish(
        "quire-hosts.toml(5), quire-policy.toml(5), quire-serve.toml(5), mount.quire(8), mkcomposefs(1), \
        composefs-info(1), composefs-dump(1), mount.composefs(8)",
    )
}

/// Returns the page of a verb.
fn verb(row: &VerbRow, command: &Command) -> ManPage {
    let mut page = Page::new(&format!("quire-{}", row.name), 1, row.about);
    page.add(|roff| {
        roff.control("SH", ["SYNOPSIS"]);
        let mut line = vec![bold(format!("quire {}", row.name))];
        let shown = || command.get_arguments().filter(|it| !it.is_hide_set());
        line.extend(shown().filter(|it| !it.is_positional()).flat_map(synopsis));
        line.extend(shown().filter(|it| it.is_positional()).flat_map(synopsis));
        roff.text(line);
    });
    let text = if row.details.is_empty() { row.about } else { row.details };
    let alias = row.alias.map(|it| format!("\n\n`quire {it}` is the same.")).unwrap_or_default();
    page.paragraphs("DESCRIPTION", &format!("{text}{alias}").replace('`', ""));
    options(&mut page, command);
    page.add(|roff| {
        roff.control("PP", []);
        roff.text([roman("The options of all commands, such as "), bold("--store")]);
        roff.text([roman("and "), bold("--quiet"), roman(", are in quire(1).")]);
    });
    page.code(
        "EXAMPLES",
        &row.examples.lines().map(|it| it.trim_start().to_owned() + "\n").collect::<String>(),
    );
    page.paragraphs("EXIT STATUS", &without_title(row.exit_codes.text()));
    page.table("ENVIRONMENT", &variables(command));
    let of_verb = FILES_OF_VERBS.iter().filter(|(verbs, ..)| verbs.contains(&row.name));
    let of_verb = of_verb.map(|(_, file, about)| (*file, *about));
    page.table("FILES", &owned(FILES.into_iter().chain(of_verb)));
    let others = VERBS.iter().filter(|it| it.group == row.group && it.name != row.name);
    let others: Vec<_> = others.map(|it| format!("quire-{}(1)", it.name)).collect();
    page.finish(&format!("quire(1), {}, quire-policy.toml(5)", others.join(", ")))
}

fn without_title(text: &str) -> String {
    text.strip_prefix("Exit codes: ").unwrap_or(text).to_owned()
}

/// Writes an option or argument with its value as in a synopsis.
fn synopsis(arg: &Arg) -> Vec<Inline> {
    let mut line = vec![roman(if arg.is_required_set() { " " } else { " [" })];
    match (arg.get_short(), arg.get_long()) {
        (Some(short), Some(long)) => {
            line.extend([bold(format!("-{short}")), roman("|"), bold(format!("--{long}"))]);
        }
        (Some(short), None) => line.push(bold(format!("-{short}"))),
        (None, Some(long)) => line.push(bold(format!("--{long}"))),
        (None, None) => {}
    }
    let takes_value = arg.get_action().takes_values();
    let value = arg.get_value_names().unwrap_or_default().join(" ");
    if takes_value && arg.is_positional() {
        let id = arg.get_id().as_str().to_uppercase();
        line.push(italic(if value.is_empty() { id } else { value }));
    } else if takes_value && arg.is_require_equals_set() {
        line.extend([roman("[="), italic(value), roman("]")]);
    } else if takes_value {
        line.extend([roman(" "), italic(value)]);
    }
    let is_many = matches!(arg.get_action(), clap::ArgAction::Append | clap::ArgAction::Count);
    if is_many {
        line.push(roman("…"));
    }
    if !arg.is_required_set() {
        line.push(roman("]"));
    }
    line
}

/// Appends the options. Their groups are parts of one section.
fn options(page: &mut Page, command: &Command) {
    let mut text = Vec::new();
    Man::new(command.clone()).render_options_section(&mut text).expect("memory takes all");
    for line in String::from_utf8_lossy(&text).lines() {
        match line.strip_prefix(".SH ") {
            Some(heading) if heading != "OPTIONS" => page.append(&format!(".SS {heading}")),
            _ => page.append(line),
        }
    }
}

/// Returns the variables that stand for options.
fn variables(command: &Command) -> Vec<(String, String)> {
    let named = command.get_arguments().filter_map(|arg| {
        let variable = arg.get_env()?.to_string_lossy().into_owned();
        Some((variable, format!("As the option --{}, which comes first.", arg.get_long()?)))
    });
    named.collect()
}

/// Returns the page of another name of this program, from its usage.
fn tool(name: &str, section: u8, about: &str, usage: &str, see_also: &str) -> ManPage {
    let mut page = Page::new(name, section, about);
    let usage = usage.replace('`', "");
    let (first, rest) = usage.split_once('\n').unwrap_or((&usage, ""));
    page.add(|roff| {
        roff.control("SH", ["SYNOPSIS"]);
        roff.text([bold(name), roman(" "), roman(first)]);
        roff.control("SH", ["DESCRIPTION"]);
        roff.text([roman("This is another name of "), bold("quire"), roman("(1).")]);
        for line in rest.lines() {
            match (line.strip_prefix("  "), line.strip_suffix(':')) {
                (Some(row), _) => {
                    let (title, text) = row.split_once("  ").unwrap_or((row, ""));
                    roff.control("TP", []);
                    roff.text([bold(title)]);
                    roff.text([roman(text.trim_start())]);
                }
                (None, Some(heading)) => {
                    let heading = heading.split(" (").next().unwrap_or(heading).to_uppercase();
                    roff.control("SH", [heading.as_str()]);
                }
                (None, None) if line.is_empty() => {
                    roff.control("PP", []);
                }
                (None, None) => {
                    roff.text([roman(line)]);
                }
            }
        }
    });
    let codes = match section {
        8 if name == "mount.quire" => {
            "0, 1 for wrong arguments, and 32 if the image is not mounted"
        }
        _ => "0, or 1 for anything refused",
    };
    page.paragraphs("EXIT STATUS", codes);
    if name == "mount.quire" {
        page.table("ENVIRONMENT", &owned([("QUIRE_STORE, QUIRE_POLICY", "As for quire(1).")]));
        let fstab = ("/etc/fstab", "Mounts of the host; the type is quire.");
        page.table("FILES", &owned(FILES.into_iter().chain([fstab])));
    } else if name == "quire-image-verifier" {
        let variables = [
            ("QUIRE_POLICY", "A policy in addition to that of the host."),
            ("HTTPS_PROXY, HTTP_PROXY, NO_PROXY", "The proxy for registries."),
        ];
        page.table("ENVIRONMENT", &owned(variables));
        let files = [
            ("/etc/quire/policy.toml", "The policy; see quire-policy.toml(5)."),
            ("/opt/containerd/image-verifier/bin", "The directory of containerd's programs."),
        ];
        page.table("FILES", &owned(files));
    } else {
        let strict =
            ("CFS_PARSE_STRICT", "Refuse what composefs refuses in a dump with this variable.");
        let none = ("None", "No variable has an effect.");
        page.table("ENVIRONMENT", &owned([if name == "mkcomposefs" { strict } else { none }]));
        let files = (
            "Objects",
            "Files named by their fs-verity digest: two digits, a slash, and the others.",
        );
        page.table("FILES", &owned([files]));
    }
    page.finish(see_also)
}

fn policy() -> ManPage {
    let mut page = Page::new("quire-policy.toml", 5, "which images Quire may use");
    let text = include_str!("../../../../../docs/policy.md");
    for (heading, part) in [
        ("DESCRIPTION", "# Policies and signatures"),
        ("FILES", "## Files"),
        ("FORMAT", "## The file"),
        ("SIGNATURES", "## Signatures"),
        ("SIGNING", "## Signing"),
        ("LOCAL IMAGES", "## Images made here"),
    ] {
        page.add(|roff| man_markdown::section(roff, heading, text, part));
    }
    let variable = ("QUIRE_POLICY", "A policy in place of the user's, as the option --policy.");
    page.table("ENVIRONMENT", &owned([variable]));
    page.finish("quire(1), quire-pull(1), quire-doctor(1), quire-serve.toml(5), cosign(1)")
}

#[cfg(feature = "registry")]
fn hosts() -> ManPage {
    let mut page = Page::new("quire-hosts.toml", 5, "mirrors and certificates of registries");
    let text = include_str!("../../../../../docs/registries.md");
    for (heading, part) in [
        ("DESCRIPTION", "# Registries and mirrors"),
        ("FILES", "## Files"),
        ("FORMAT", "## The file"),
    ] {
        page.add(|roff| man_markdown::section(roff, heading, text, part));
    }
    let variables = [
        ("XDG_CONFIG_HOME", "The directory of a user's files, instead of ~/.config."),
        ("HTTPS_PROXY, HTTP_PROXY, NO_PROXY", "The proxy for hosts without the field proxy."),
    ];
    page.table("ENVIRONMENT", &owned(variables));
    page.finish(
        "quire(1), quire-pull(1), quire-push(1), quire-login(1), quire-policy.toml(5), quire-serve.toml(5)",
    )
}

#[cfg(feature = "serve")]
fn run_defaults() -> ManPage {
    let mut page = Page::new("quire-run.toml", 5, "defaults of containers");
    let text = include_str!("../../../../../docs/containers.md");
    page.add(|roff| man_markdown::section(roff, "DESCRIPTION", text, "## Defaults"));
    let files = [
        ("/etc/quire/run.toml", "The administrator's defaults; it may be absent."),
        (
            "$XDG_CONFIG_HOME/quire/run.toml",
            "A user's own defaults; by default in ~/.config/quire.",
        ),
    ];
    page.table("FILES", &owned(files));
    let variable = ("XDG_CONFIG_HOME", "The directory of a user's files, instead of ~/.config.");
    page.table("ENVIRONMENT", &owned([variable]));
    page.finish(
        "quire(1), quire-run(1), quire-create(1), quire-policy.toml(5), quire-serve.toml(5)",
    )
}

#[cfg(feature = "serve")]
fn settings() -> ManPage {
    let mut page = Page::new("quire-serve.toml", 5, "settings of Quire's services");
    let lazy = include_str!("../../../../../docs/lazy.md");
    let engines = include_str!("../../../../../docs/engines.md");
    let containers = include_str!("../../../../../docs/containers.md");
    for (heading, text, part) in [
        ("LAZY IMAGES", lazy, "## Settings"),
        ("SNAPSHOTTER", engines, "## Settings"),
        ("MOUNT SERVICE", containers, "### The mount service"),
    ] {
        page.add(|roff| man_markdown::section(roff, heading, text, part));
    }
    let file = ("/etc/quire/serve.toml", "Settings of all services of the host; it may be absent.");
    page.table("FILES", &owned([file]));
    let variable = ("QUIRE_MOUNT_SERVICE", "The socket of the mount service, for its users.");
    page.table("ENVIRONMENT", &owned([variable]));
    page.finish(
        "quire(1), quire-serve(1), quire-doctor(1), quire-hosts.toml(5), quire-policy.toml(5)",
    )
}

#[cfg(all(test, feature = "serve"))]
mod tests {
    use super::*;

    #[test]
    fn pages_have_their_sections() {
        let pages = pages();
        for name in [
            "quire.1",
            "quire-run.1",
            "mkcomposefs.1",
            "composefs-info.1",
            "composefs-dump.1",
            "mount.quire.8",
            "mount.composefs.8",
            "quire-image-verifier.8",
            "quire-hosts.toml.5",
            "quire-policy.toml.5",
            "quire-run.toml.5",
            "quire-serve.toml.5",
        ] {
            let has = pages.iter().any(|it| format!("{}.{}", it.name, it.section) == name);
            assert!(has, "{name}");
        }
        for ManPage { name, text, .. } in &pages {
            for heading in ["NAME", "FILES", "ENVIRONMENT", "\"SEE ALSO\""] {
                assert_eq!(
                    text.matches(&format!("\n.SH {heading}\n")).count(),
                    1,
                    "{name}: {heading}\n{text}"
                );
            }
            assert!(!text.contains("EXTRA") && !text.contains("SH VERSION"), "{name}");
            assert_eq!(text.matches(env!("CARGO_PKG_VERSION")).count(), 1, "{name}: {text}");
            assert!(!text.contains("](") && !text.contains("\n|"), "{name}: {text}");
        }
    }

    #[test]
    fn synopses_have_values() {
        let pages = pages();
        let page = pages.iter().find(|it| it.name == "quire-run").unwrap();
        let synopsis = page.text.split(".SH SYNOPSIS\n").nth(1).unwrap().lines().next().unwrap();
        for part in [r"\fB\-\-name\fR \fINAME\fR", r"\fB\-\-lazy\fR[=\fIHOW\fR]", r"\fIIMAGE\fR"] {
            assert!(synopsis.contains(part), "{part}: {synopsis}");
        }
        assert!(!synopsis.contains("store"), "{synopsis}");
    }

    /// A page refers only to pages of ours, and to well-known ones.
    #[test]
    fn pages_refer_to_pages() {
        let pages = pages();
        let known = ["mount(8)", "fstab(5)", "subuid(5)", "cosign(1)"];
        let ours: Vec<_> = pages.iter().map(|it| format!("{}({})", it.name, it.section)).collect();
        for ManPage { name, text, .. } in &pages {
            let see_also = text.split(".SH \"SEE ALSO\"\n").nth(1).unwrap().replace("\\-", "-");
            let words = see_also.split([' ', '\n', ',']).filter(|it| it.ends_with(')'));
            for word in words {
                let is_known = known.contains(&word) || ours.iter().any(|it| it == word);
                assert!(is_known && word != format!("{name}(1)"), "{name}: {word}");
            }
        }
    }
}
