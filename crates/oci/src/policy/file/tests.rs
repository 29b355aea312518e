use std::path::Path;

use super::{Accept, Default, Identity, Policy, distance};
use crate::policy::Pattern;

/// An Ed25519 key. Source: RFC 8410, section 10.1.
const KEY: &str = "-----BEGIN PUBLIC KEY-----\n\
                   MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n\
                   -----END PUBLIC KEY-----\n";

fn load(text: &str) -> Result<Policy, String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("policy.toml");
    std::fs::write(&file, text).unwrap();
    std::fs::write(folder.path().join("a.pub"), KEY).unwrap();
    std::fs::write(folder.path().join("two.pub"), KEY.repeat(2)).unwrap();
    let rsa = KEY.replace("MCowBQYDK2Vw", "MCowBQYDK2Vu");
    std::fs::write(folder.path().join("x25519.pub"), rsa).unwrap();
    std::fs::write(folder.path().join("private.key"), KEY.replace("PUBLIC", "PRIVATE")).unwrap();
    match Policy::load(&file) {
        Ok(found) => Ok(found.expect("it is there")),
        Err(error) => {
            assert_eq!(error.file, file);
            let source = std::error::Error::source(&error.flaw);
            let text =
                format!("{}: {}", error.flaw, source.map_or(String::new(), |it| it.to_string()));
            Err(text.replace(folder.path().to_str().unwrap(), "DIR"))
        }
    }
}

#[test]
fn a_whole_policy() {
    let digest = format!("sha256:{}", "a".repeat(64));
    let policy = load(&format!(
        "# Ours.\ndefault = \"none\"\n\n[[rule]]\nmatch = \"local\"\naccept = \"any\"\n\n\
         [[rule]]\nmatch = [\"docker.io/library/*\", \"ghcr.io/x/**\"]\naccept = \"signed\"\n\
         keys = [\"a.pub\"]\nidentity = \"any\"\ndigests = [\"{digest}\"]\n\n\
         [[rule]]\nmatch = \"ghcr.io/y\"\naccept = \"signed\"\nkeys = \"a.pub\"\nidentity = \"ghcr.io/z\"\n"
    ));
    let policy = policy.unwrap();
    assert_eq!(policy.default, Default::None);
    let [local, signed, named] = policy.rules.as_slice() else { panic!("{policy:?}") };
    assert_eq!((local.line, &local.accept), (4, &Accept::Any));
    assert_eq!(local.patterns, [Pattern::Local]);
    assert_eq!((signed.line, signed.patterns.len()), (8, 2));
    assert_eq!(signed.digests, [digest.parse().unwrap()]);
    let Accept::Signed(keys, Identity::Any) = &signed.accept else { panic!("{signed:?}") };
    assert_eq!(keys[0].0.file_name().unwrap(), "a.pub");
    let Accept::Signed(_, Identity::Named(name)) = &named.accept else { panic!("{named:?}") };
    assert_eq!(name.as_str(), "ghcr.io/z");
}

#[test]
fn what_is_not_understood_is_an_error_that_says_where() {
    let rule = "default = \"any\"\n[[rule]]\nmatch = \"ghcr.io/**\"\n";
    let cases = [
        ("", "line 1: a policy needs default"),
        ("default = \"all\"", "line 1: default must be \"any\" or \"none\""),
        ("default = \"any\"\ndefault = \"any\"", "line 2: duplicate key"),
        ("default = \"any\"\n[rule", "line 2: "),
        (
            "defualt = \"any\"",
            "line 1: \"defualt\" is not a field of a policy: did you mean \"default\"?",
        ),
        (
            "default = \"any\"\n[[rules]]",
            "line 2: \"rules\" is not a field of a policy: did you mean \"rule\"?",
        ),
        ("default = \"any\"\nrule = 1", "line 2: rule must be written as [[rule]]"),
        ("default = \"any\"\n[rule]\n", "line 2: rule must be written as [[rule]]"),
        ("default = \"any\"\n[[rule]]\naccept = \"any\"", "line 2: a rule needs match"),
        (rule, "line 2: a rule needs accept"),
        (
            &format!("{rule}accept = \"some\""),
            "line 4: accept must be \"any\", \"none\" or \"signed\"",
        ),
        (
            &format!("{rule}acept = \"any\""),
            "line 4: \"acept\" is not a field of a rule: did you mean \"accept\"?",
        ),
        (&format!("{rule}key = []"), "did you mean \"keys\"?"),
        (&format!("{rule}digest = []"), "did you mean \"digests\"?"),
        (&format!("{rule}accept = \"signed\""), "line 2: a rule needs keys"),
        (
            &format!("{rule}accept = \"signed\"\nkeys = []"),
            "line 5: keys must be a non-empty list of files",
        ),
        (
            &format!("{rule}accept = \"signed\"\nkeys = [1]"),
            "line 5: keys must be a non-empty list of files",
        ),
        (
            &format!("{rule}accept = \"signed\"\nkeys = [\n\"a.pub\",\n\"b.pub\"]"),
            "line 7: the key DIR/b.pub cannot be read: No such file",
        ),
        (
            &format!("{rule}accept = \"signed\"\nkeys = \"two.pub\""),
            "DIR/two.pub is not a key: it has several",
        ),
        (
            &format!("{rule}accept = \"signed\"\nkeys = \"private.key\""),
            "is not a key: it lacks \"-----BEGIN",
        ),
        (
            &format!("{rule}accept = \"signed\"\nkeys = \"x25519.pub\""),
            "is not a key: its public key has another type than",
        ),
        (&format!("{rule}accept = \"signed\"\nkeys = \".\""), "is not a key"),
        (
            &format!("{rule}accept = \"signed\"\nkeys = \"a.pub\"\nidentity = \"me\""),
            "line 6: identity must be",
        ),
        (&format!("{rule}accept = \"any\"\nkeys = \"a.pub\""), "keys needs accept = \"signed\""),
        (&format!("{rule}accept = \"any\"\nidentity = \"any\""), "identity needs accept"),
        (
            &format!("{rule}accept = \"any\"\ndigests = []"),
            "line 5: digests must be a non-empty list of digests",
        ),
        (
            &format!("{rule}accept = \"any\"\ndigests = [\"sha256:0\"]"),
            "line 5: \"sha256:0\" is not a digest",
        ),
        (
            &format!("{rule}accept = \"none\"\ndigests = [\"sha256:{}\"]", "a".repeat(64)),
            "this rule accepts no images",
        ),
        ("default = \"any\"\n[[rule]]\nmatch = []", "line 3: match must be a repository"),
        (
            "default = \"any\"\n[[rule]]\nmatch = [\n\"ghcr.io/a\",\n\"alpine\"]",
            "line 5: \"alpine\" has no registry",
        ),
        (
            "default = \"any\"\n[[rule]]\nmatch = \"local\"\naccept = \"signed\"\nkeys = \"a.pub\"\n\
             identity = \"repository\"",
            "line 2: images made here come from no repository",
        ),
        (
            "default = \"any\"\n[[rule]]\nmatch = [\"local\", \"ghcr.io/**\"]\naccept = \"signed\"\n\
             keys = \"a.pub\"",
            "line 2: a rule for local and for repositories needs identity",
        ),
    ];
    for (text, expect) in cases {
        let error = load(text).unwrap_err();
        assert!(error.contains(expect), "{text}\n{error}");
    }
}

#[test]
fn rules_with_keys_for_local() {
    let identity = |rule: &str| {
        let rule =
            format!("default = \"any\"\n[[rule]]\naccept = \"signed\"\nkeys = \"a.pub\"\n{rule}");
        let policy = load(&rule).unwrap();
        let Accept::Signed(_, identity) = &policy.rules[0].accept else { panic!("{policy:?}") };
        identity.clone()
    };
    assert_eq!(identity("match = \"local\""), Identity::Any);
    assert_eq!(identity("match = [\"local\"]\nidentity = \"any\""), Identity::Any);
    assert_eq!(identity("match = \"ghcr.io/**\""), Identity::Repository);
    let both = "match = [\"ghcr.io/**\", \"local\"]";
    assert_eq!(identity(&format!("{both}\nidentity = \"any\"")), Identity::Any);
    let named = identity(&format!("{both}\nidentity = \"ghcr.io/ours/app\""));
    assert!(matches!(named, Identity::Named(name) if name.as_str() == "ghcr.io/ours/app"));
}

#[test]
fn only_a_policy_that_is_not_there_is_none() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(Policy::load(&folder.path().join("absent")).unwrap(), None);
    assert!(Policy::load(folder.path()).is_err(), "a directory");
    assert!(Policy::load(Path::new("/dev/zero")).is_err());
    let file = folder.path().join("policy.toml");
    std::fs::write(&file, b"default = \"any\"\n\n# \xff").unwrap();
    let error = Policy::load(&file).unwrap_err();
    assert_eq!(error.flaw.to_string(), "line 3: it is not UTF-8");
    std::fs::write(&file, vec![b'#'; (1 << 20) + 1]).unwrap();
    assert!(Policy::load(&file).is_err(), "a mebibyte of comment");
}

#[test]
fn distances() {
    // Levenshtein's classic example, and the limits.
    for (a, b, far) in [("kitten", "sitting", 3), ("", "abc", 3), ("same", "same", 0)] {
        assert_eq!(distance(a, b), far);
        assert_eq!(distance(b, a), far);
    }
}
