//! Gets ids for a user namespace from systemd-nsresourced. Its interface is described by `varlinkctl introspect` and
//! by systemd-nsresourced.service(8).

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use kernel::process::IdService;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::varlink::{CallError, Client};

/// Socket of systemd-nsresourced.
pub const IDS_SOCKET: &str = "/run/systemd/io.systemd.NamespaceResource";

/// Longest wait for a reply: a service that is just starting first loads BPF programs into the kernel.
const ANSWER: Duration = Duration::from_secs(30);

/// Why no ids were allocated.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum IdsError {
    /// The service's socket does not exist, or no process listens there.
    #[error("systemd-nsresourced is not running")]
    Absent,
    /// Connecting to the service or exchanging messages with it failed.
    #[error("cannot reach systemd-nsresourced: {0}")]
    Talk(String),
    /// The service does not know the method or a parameter.
    #[error("systemd-nsresourced is too old to assign ids to containers ({0})")]
    Old(String),
    /// The kernel lacks a feature that the service needs.
    #[error(
        "systemd-nsresourced cannot assign ids on this system: it needs a kernel with BPF among \
        its security modules (`bpf` in /sys/kernel/security/lsm) and libbpf"
    )]
    Unsupported,
    /// The service has no ids left, or this user has reached the limit of namespaces.
    #[error("systemd-nsresourced has no free ids, or none for this user: stop a container")]
    Exhausted,
    /// The service refused for another reason.
    #[error("systemd-nsresourced refused: {0}")]
    Refused(String),
}

/// An error of the service's own interface.
#[derive(Debug, Deserialize)]
struct OwnError {
    error: String,
    parameters: Option<Value>,
}

/// A client of systemd-nsresourced; the field is the socket's path. Calls start no thread.
#[derive(Debug)]
pub struct IdsService<'a>(pub &'a str);

impl IdService for IdsService<'_> {
    /// Has the service allocate ids for a user namespace that has none: this process's own user and group, each mapped
    /// to itself, and 65,536 other ids, mapped to themselves. The service takes the ids back when the namespace ends.
    /// Until then, it prevents files with these owners from being created in permanent file systems.
    fn give(&self, user_namespace: OwnedFd) -> Result<(), String> {
        let parameters = json!({
            "mangleName": true,
            "size": 1,
            "type": "self",
            "delegateContainerRanges": 1,
            "userNamespaceFileDescriptor": 0,
        });
        let called = self.call("AllocateUserRange", parameters, &user_namespace);
        called.map_err(|error| error.to_string())
    }

    /// Registers a nested namespace: the service's policy allows `setgroups` only in registered namespaces below one
    /// that maps a user to itself.
    fn register(&self, user_namespace: OwnedFd) -> Result<(), String> {
        let parameters = json!({
            "mangleName": true,
            "userNamespaceFileDescriptor": 0,
        });
        let called = self.call("RegisterUserNamespace", parameters, &user_namespace);
        called.map_err(|error| error.to_string())
    }
}

impl IdsService<'_> {
    /// Calls a method with a random name for the namespace, and tries other names while the service reports a
    /// duplicate.
    fn call(
        &self,
        method: &str,
        mut parameters: Value,
        user_namespace: &OwnedFd,
    ) -> Result<(), IdsError> {
        let client = Client::connect(Path::new(self.0))
            .map_err(|error| IdsError::Talk(error.to_string()))?;
        let mut client = client.ok_or(IdsError::Absent)?;
        let method = format!("io.systemd.NamespaceResource.{method}");
        for _ in 0..NAMES {
            parameters["name"] = name().into();
            let again = user_namespace.try_clone();
            let again = again.map_err(|error| IdsError::Talk(error.to_string()))?;
            let called =
                client.call::<Value, OwnError>(&method, parameters.clone(), vec![again], ANSWER);
            match called {
                Ok(_named) => return Ok(()),
                Err(CallError::Refused(OwnError { error, .. })) if error == TAKEN => {}
                Err(CallError::Refused(error)) => return Err(error.into()),
                Err(CallError::Unknown(error)) => return Err(IdsError::of_varlink(&error)),
                Err(CallError::Talk(why)) => return Err(IdsError::Talk(why)),
            }
        }
        Err(IdsError::Refused(TAKEN.to_owned()))
    }
}

/// Largest number of names to try.
const NAMES: u32 = 20;

/// The error for a name that another namespace already has.
const TAKEN: &str = "io.systemd.NamespaceResource.NameExists";

/// Returns a random name for a namespace. The service prefixes the user's number and shortens the result to 22 bytes,
/// so longer names could collide.
fn name() -> String {
    // The keys of `RandomState` are random, so the hash of an empty input is random as well.
    let random = RandomState::new().build_hasher().finish();
    format!("quire{:06x}", random >> 40)
}

impl From<OwnError> for IdsError {
    fn from(OwnError { error, parameters }: OwnError) -> Self {
        let errno = parameters.as_ref().and_then(|it| it["errnoName"].as_str());
        match (error.strip_prefix("io.systemd.NamespaceResource."), errno) {
            (Some("UserNamespaceInterfaceNotSupported"), _) => Self::Unsupported,
            (Some("DynamicRangeUnavailable" | "NoDynamicRange"), _) => Self::Exhausted,
            // The service's limit of namespaces for each user.
            (_, Some("EUSERS")) => Self::Exhausted,
            (_, Some(errno)) => Self::Refused(format!("{error} ({errno})")),
            _ => Self::Refused(error),
        }
    }
}

impl IdsError {
    fn of_varlink(error: &zlink::varlink_service::Error<'_>) -> Self {
        use zlink::varlink_service::Error;
        match error {
            Error::InterfaceNotFound { .. }
            | Error::MethodNotFound { .. }
            | Error::MethodNotImplemented { .. } => Self::Old(error.to_string()),
            Error::InvalidParameter { parameter } if NEW.contains(&&**parameter) => {
                Self::Old(error.to_string())
            }
            _ => Self::Refused(error.to_string()),
        }
    }
}

/// Parameters that the first version of the interface did not have.
const NEW: [&str; 3] = ["mangleName", "type", "delegateContainerRanges"];

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Runs `what` with a fake service that sends `answer`. Returns the result and the call that the service received.
    fn ask(
        answer: &str,
        what: impl Fn(&IdsService<'_>, OwnedFd) -> Result<(), String>,
    ) -> (Result<(), String>, Value) {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        let answer = [answer.as_bytes(), b"\0"].concat();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = Vec::new();
            while asked.last() != Some(&0) {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                asked.push(byte[0]);
            }
            stream.write_all(&answer).unwrap();
            serde_json::from_slice(&asked[..asked.len() - 1]).unwrap()
        });
        let namespace = File::open("/proc/self/ns/user").unwrap();
        let said = what(&IdsService(socket.to_str().unwrap()), namespace.into());
        (said, server.join().unwrap())
    }

    #[test]
    fn the_service_is_asked_as_it_describes_itself() {
        let (given, asked) = ask(r#"{"parameters": {"name": "1000-x"}}"#, |it, of| it.give(of));
        assert_eq!(given, Ok(()));
        assert_eq!(asked["method"], "io.systemd.NamespaceResource.AllocateUserRange");
        let parameters = &asked["parameters"];
        assert_eq!(parameters["type"], "self");
        assert_eq!(parameters["size"], 1);
        assert_eq!(parameters["delegateContainerRanges"], 1);
        assert_eq!(parameters["userNamespaceFileDescriptor"], 0);
        let (registered, asked) = ask(r#"{"parameters": {}}"#, |it, of| it.register(of));
        assert_eq!(registered, Ok(()));
        assert_eq!(asked["method"], "io.systemd.NamespaceResource.RegisterUserNamespace");
        assert_ne!(asked["parameters"]["name"], parameters["name"]);
        // With a uid of ten digits in its prefix, the name is exactly as long as the service's limit of 22 bytes.
        assert_eq!(parameters["name"].as_str().map(str::len), Some(11));
    }

    #[test]
    fn a_refusal_says_what_to_do() {
        let error = |name: &str, more: &str| {
            let answer = format!(r#"{{"error": "{name}"{more}}}"#);
            ask(&answer, |it, of| it.give(of)).0.unwrap_err()
        };
        let own = |name: &str| error(&format!("io.systemd.NamespaceResource.{name}"), "");
        assert!(own("UserNamespaceInterfaceNotSupported").contains("/sys/kernel/security/lsm"));
        assert!(own("DynamicRangeUnavailable").contains("stop a container"));
        assert!(own("UserNamespaceExists").contains("UserNamespaceExists"));
        // The client tries another name, but this server accepts only one connection.
        assert!(own("NameExists").starts_with("cannot reach"));
        let old = r#", "parameters": {"parameter": "type"}"#;
        assert!(error("org.varlink.service.InvalidParameter", old).contains("too old"));
        let wrong = r#", "parameters": {"parameter": "userNamespaceFileDescriptor"}"#;
        let wrong = error("org.varlink.service.InvalidParameter", wrong);
        assert!(wrong.contains("refused") && wrong.contains("userNamespace"), "{wrong}");
        assert!(error("org.varlink.service.PermissionDenied", "").contains("refused"));
        let many = r#", "parameters": {"origin": "linux", "errno": 87, "errnoName": "EUSERS"}"#;
        assert!(error("io.systemd.System", many).contains("stop a container"));
        let other = r#", "parameters": {"origin": "linux", "errno": 1, "errnoName": "EPERM"}"#;
        assert!(error("io.systemd.System", other).contains("EPERM"));
        // A service that closes the connection without a reply, and a socket that does not exist.
        let nothing = ask("", |it, of| it.give(of)).0.unwrap_err();
        assert!(nothing.starts_with("cannot reach systemd-nsresourced"), "{nothing}");
        let namespace = File::open("/proc/self/ns/user").unwrap();
        let absent = IdsService("/nowhere/socket").give(namespace.into());
        assert_eq!(absent, Err(IdsError::Absent.to_string()));
    }
}
