//! Authenticates to registries by their challenges. Source: RFC 9110, 11; distribution's
//! `docs/content/spec/auth/{token,oauth}.md`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderValue, WWW_AUTHENTICATE};
use reqwest::{Method, Url};

use super::credentials::{Credential, CredentialError, Keyring, Secret};
use super::error::{Cause, escaped};
use super::hosts::{Endpoint, authority};
use super::manifests::check_json;
use super::patience;
use super::transport::{Answer, Ask, Transport, take_end};

/// Default lifetime of a token. Source: `token.md`, `expires_in`.
const TOKEN_LIFE: Duration = Duration::from_secs(60);
/// Time before its end at which a token is renewed.
const TOKEN_MARGIN: Duration = Duration::from_secs(5);
/// Maximum response of a token server in bytes, larger than any real one.
const TOKEN_ANSWER_MAX: u64 = 1 << 20;
/// Maximum error response in bytes, larger than any real one.
pub(super) const ERROR_MAX: u64 = 64 << 10;

/// A challenge of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Challenge {
    Basic,
    Bearer { realm: String, service: Option<String>, scope: Option<String> },
}

struct Token {
    value: HeaderValue,
    until: Instant,
}

/// Identifies a token: host, realm, service and scopes.
type Key = (String, String, Option<String>, Vec<String>);

/// The result of looking up a host's credentials.
#[derive(Clone)]
enum Asked {
    Found(Option<Credential>),
    /// This helper timed out. Other requests must not wait for the same time again.
    Hung(PathBuf, Duration),
}

/// Credentials, challenges and tokens for the hosts of one registry.
pub(super) struct Authenticator {
    keyring: Keyring,
    repository: String,
    challenges: Mutex<BTreeMap<String, Challenge>>,
    credentials: tokio::sync::Mutex<BTreeMap<String, Asked>>,
    // Locked while a token is fetched, so that parallel requests fetch only one.
    tokens: tokio::sync::Mutex<BTreeMap<Key, Token>>,
}

impl Authenticator {
    pub(super) fn new(keyring: Keyring, repository: String) -> Self {
        Self {
            keyring,
            repository,
            challenges: Mutex::default(),
            credentials: tokio::sync::Mutex::default(),
            tokens: tokio::sync::Mutex::default(),
        }
    }

    /// Sends a request, with credentials if the server has asked for them. After a challenge, sends it once more.
    pub(super) async fn call(
        &self,
        transport: &Transport,
        endpoint: &Endpoint,
        ask: &Ask,
        scopes: &[String],
    ) -> Result<Answer, Cause> {
        let authorization = self.authorization(transport, endpoint, scopes).await?;
        let answer = transport.send(endpoint, ask, authorization.as_ref()).await?;
        if answer.response.status().as_u16() != 401 || !answer.is_own {
            return Ok(answer);
        }
        let Some(challenge) = Challenge::parse(answer.response.headers()) else {
            return Err(self.refused(transport, endpoint, answer).await);
        };
        self.challenges
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(endpoint.base.clone(), challenge);
        if let Some(stale) = authorization {
            self.tokens.lock().await.retain(|_, token| token.value != stale);
        }
        let authorization = self.authorization(transport, endpoint, scopes).await?;
        if authorization.is_none() {
            return Err(self.refused(transport, endpoint, answer).await);
        }
        take_end(answer.response);
        let answer = transport.send(endpoint, ask, authorization.as_ref()).await?;
        if answer.response.status().as_u16() == 401 && answer.is_own {
            return Err(self.refused(transport, endpoint, answer).await);
        }
        Ok(answer)
    }

    /// Whether a server has asked for credentials.
    pub(super) fn was_asked(&self, endpoint: &Endpoint) -> bool {
        let challenges = self.challenges.lock().unwrap_or_else(PoisonError::into_inner);
        challenges.contains_key(&endpoint.base)
    }

    async fn refused(&self, transport: &Transport, endpoint: &Endpoint, answer: Answer) -> Cause {
        let headers = answer.response.headers().clone();
        let body = transport.body(answer.response, ERROR_MAX).await.unwrap_or_default();
        match Cause::of_status(401, &headers, &body, &endpoint.host) {
            Cause::NoCredentials { host, words } => self.unauthorized(host, words).await,
            other => other,
        }
    }

    async fn unauthorized(&self, host: String, words: String) -> Cause {
        match self.credentials.lock().await.get(&host) {
            Some(Asked::Found(Some(_))) => Cause::Refused { host, words },
            _ => Cause::NoCredentials { host, words },
        }
    }

    /// Returns the `Authorization` header for a host, according to its last challenge.
    async fn authorization(
        &self,
        transport: &Transport,
        endpoint: &Endpoint,
        scopes: &[String],
    ) -> Result<Option<HeaderValue>, Cause> {
        let challenge = self
            .challenges
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&endpoint.base)
            .cloned();
        let Some(challenge) = challenge else { return Ok(None) };
        let credential = self.credential(&endpoint.host).await?;
        match (challenge, credential) {
            (Challenge::Basic, Some(Credential::Password { user, password })) => {
                Ok(Some(basic(&user, &password)))
            }
            (Challenge::Basic, _) => Ok(None),
            (Challenge::Bearer { .. }, Some(Credential::Bearer(token))) => {
                Ok(Some(bearer(&token)?))
            }
            (Challenge::Bearer { realm, service, scope }, credential) => {
                let mut scopes = scopes.to_vec();
                // If the registry uses another name for this repository, the challenge contains that name.
                if let Some(scope) = scope.filter(|scope| !scope.is_empty()) {
                    let (resource, _) = scope.rsplit_once(':').unwrap_or((&scope, ""));
                    if !scopes.iter().any(|own| own.starts_with(&format!("{resource}:"))) {
                        scopes.push(scope);
                    }
                }
                let request = TokenRequest { realm, service, scopes };
                self.token(transport, endpoint, request, credential.as_ref()).await.map(Some)
            }
        }
    }

    async fn credential(&self, host: &str) -> Result<Option<Credential>, Cause> {
        let mut known = self.credentials.lock().await;
        match known.get(host).cloned() {
            Some(Asked::Found(credential)) => return Ok(credential),
            Some(Asked::Hung(path, timeout)) => {
                return Err(Cause::Credentials(CredentialError::HelperTimeout { path, timeout }));
            }
            None => {}
        }
        let (keyring, repository) = (self.keyring.clone(), self.repository.clone());
        let name = host.to_owned();
        // This runs on a blocking thread, because a helper may take long.
        let found =
            tokio::task::spawn_blocking(move || keyring.find_credential(&name, &repository)).await;
        let found = found.map_err(|error| Cause::Protocol(error.to_string()))?;
        if let Err(CredentialError::HelperTimeout { path, timeout }) = &found {
            known.insert(host.to_owned(), Asked::Hung(path.clone(), *timeout));
        }
        let found = found.map_err(Cause::Credentials)?;
        known.insert(host.to_owned(), Asked::Found(found.clone()));
        Ok(found)
    }

    async fn token(
        &self,
        transport: &Transport,
        endpoint: &Endpoint,
        request: TokenRequest,
        credential: Option<&Credential>,
    ) -> Result<HeaderValue, Cause> {
        let TokenRequest { realm, service, scopes } = request;
        let mut tokens = self.tokens.lock().await;
        let key = (endpoint.host.clone(), realm.clone(), service.clone(), scopes.clone());
        let now = Instant::now();
        if let Some(token) = tokens.get(&key).filter(|token| token.until > now) {
            return Ok(token.value.clone());
        }
        let url = Url::parse(&realm)
            .ok()
            .filter(|url| matches!(url.scheme(), "http" | "https"))
            .ok_or_else(|| {
                Cause::Protocol(format!(
                    "its token server has the invalid address \"{}\"",
                    escaped(&realm)
                ))
            })?;
        let host = authority(&url).unwrap_or_default();
        if url.scheme() == "http" && endpoint.base.starts_with("https:") {
            return Err(Cause::Downgrade(host));
        }
        let ask = ask_for_token(url, service.as_deref(), &scopes, credential);
        let fetch = self.fetch_token(transport, endpoint, &ask, credential);
        let found = patience::as_document(transport.patience, fetch).await;
        let (secret, life) = match found {
            Ok(found) => found,
            Err(cause @ (Cause::NoCredentials { .. } | Cause::Refused { .. })) => {
                return Err(cause);
            }
            Err(source) => return Err(Cause::Token { host, source: Box::new(source) }),
        };
        let value = bearer(&secret)?;
        let until = now + life.saturating_sub(TOKEN_MARGIN);
        tokens.insert(key, Token { value: value.clone(), until });
        Ok(value)
    }

    async fn fetch_token(
        &self,
        transport: &Transport,
        endpoint: &Endpoint,
        ask: &Ask,
        credential: Option<&Credential>,
    ) -> Result<(Secret, Duration), Cause> {
        let host = authority(&ask.url).unwrap_or_default();
        let server = Endpoint {
            base: format!("{}://{host}", ask.url.scheme()),
            route: match host == endpoint.host {
                true => endpoint.route.clone(),
                false => endpoint.route.elsewhere(),
            },
            host,
            capabilities: Vec::new(),
            headers: Vec::new(),
            mirror_of: None,
            may_use_http: false,
        };
        let authorization = match credential {
            Some(Credential::Password { user, password }) => Some(basic(user, password)),
            _ => None,
        };
        let answer = transport.send(&server, ask, authorization.as_ref()).await?;
        let status = answer.response.status().as_u16();
        let headers = answer.response.headers().clone();
        if status != 200 {
            let body = transport.body(answer.response, ERROR_MAX).await.unwrap_or_default();
            let cause = Cause::of_status(status, &headers, &body, &endpoint.host);
            // If the password is wrong, token servers return 401 or 403, and some return 400.
            let is_ours = status == 401 || (matches!(status, 400 | 403) && credential.is_some());
            if is_ours {
                let words = match cause {
                    Cause::NoCredentials { words, .. }
                    | Cause::Denied { words }
                    | Cause::Status { words, .. } => words,
                    other => other.to_string(),
                };
                return Err(self.unauthorized(endpoint.host.clone(), words).await);
            }
            return Err(cause);
        }
        #[derive(serde::Deserialize)]
        struct Granted {
            token: Option<Secret>,
            access_token: Option<Secret>,
            expires_in: Option<u64>,
        }
        let body = transport.body(answer.response, TOKEN_ANSWER_MAX).await?;
        check_json("a token", &body, &headers)?;
        let granted: Granted = serde_json::from_slice(&body)
            .map_err(|_error| Cause::Protocol("the token server sent no token".to_owned()))?;
        let token =
            granted.token.or(granted.access_token).filter(|token| !token.expose().is_empty());
        let token =
            token.ok_or_else(|| Cause::Protocol("the token server sent no token".to_owned()))?;
        let life = granted.expires_in.filter(|seconds| *seconds > 0).map(Duration::from_secs);
        // At most a day, so that the sum with the current time cannot overflow.
        Ok((token, life.unwrap_or(TOKEN_LIFE).min(Duration::from_secs(86_400))))
    }
}

struct TokenRequest {
    realm: String,
    service: Option<String>,
    scopes: Vec<String>,
}

fn ask_for_token(
    mut url: Url,
    service: Option<&str>,
    scopes: &[String],
    credential: Option<&Credential>,
) -> Ask {
    let Some(Credential::Identity(token)) = credential else {
        let mut query = url.query_pairs_mut();
        if let Some(service) = service {
            query.append_pair("service", service);
        }
        for scope in scopes {
            query.append_pair("scope", scope);
        }
        if let Some(Credential::Password { user, .. }) = credential {
            query.append_pair("account", user);
        }
        drop(query);
        return Ask::new(Method::GET, url);
    };
    // Encodes the form with `Url`, the only encoder among the dependencies.
    let mut form = Url::parse("x:").expect("the address is valid");
    form.query_pairs_mut()
        .append_pair("grant_type", "refresh_token")
        .append_pair("service", service.unwrap_or_default())
        .append_pair("client_id", "quire")
        .append_pair("scope", &scopes.join(" "))
        .append_pair("refresh_token", token.expose());
    let body = form.query().unwrap_or_default().to_owned();
    let mut ask = Ask::new(Method::POST, url)
        .header(CONTENT_TYPE, HeaderValue::from_static("application/x-www-form-urlencoded"));
    ask.body = Some(body.into());
    ask.is_secret = true;
    ask
}

fn basic(user: &str, password: &Secret) -> HeaderValue {
    let text = STANDARD.encode(format!("{user}:{}", password.expose()));
    let mut value =
        HeaderValue::try_from(format!("Basic {text}")).expect("base64 has no control characters");
    value.set_sensitive(true);
    value
}

fn bearer(token: &Secret) -> Result<HeaderValue, Cause> {
    let mut value = HeaderValue::try_from(format!("Bearer {}", token.expose()))
        .map_err(|_error| Cause::Protocol("the token is not a valid header".to_owned()))?;
    value.set_sensitive(true);
    Ok(value)
}

impl Challenge {
    /// Returns the preferred challenge of a server: bearer before basic.
    fn parse(headers: &HeaderMap) -> Option<Self> {
        let texts =
            headers.get_all(WWW_AUTHENTICATE).iter().filter_map(|value| value.to_str().ok());
        let mut challenges: Vec<_> = texts.flat_map(challenges).collect();
        challenges.sort_by_key(|challenge| *challenge == Self::Basic);
        challenges.into_iter().next()
    }
}

/// Parses the known challenges in a header: `Bearer realm="…",service="…", Basic realm="…"`.
fn challenges(mut rest: &str) -> Vec<Challenge> {
    let mut found: Vec<(String, BTreeMap<String, String>)> = Vec::new();
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        let end = rest.find(|byte: char| " \t,=".contains(byte)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        if word.is_empty() {
            break;
        }
        let after_space = after.trim_start_matches([' ', '\t']);
        let (Some(value), Some((_, parameters))) =
            (after_space.strip_prefix('='), found.last_mut())
        else {
            found.push((word.to_ascii_lowercase(), BTreeMap::new()));
            rest = after.trim_start_matches('=');
            continue;
        };
        let value = value.trim_start_matches([' ', '\t']);
        let (value, next) = match value.strip_prefix('"') {
            Some(quoted) => unquote(quoted),
            None => {
                let end = value.find([',', ' ', '\t']).unwrap_or(value.len());
                (value[..end].to_owned(), &value[end..])
            }
        };
        parameters.entry(word.to_ascii_lowercase()).or_insert(value);
        rest = next;
    }
    let known = found.into_iter().filter_map(|(scheme, mut parameters)| match scheme.as_str() {
        "basic" => Some(Challenge::Basic),
        "bearer" => Some(Challenge::Bearer {
            realm: parameters.remove("realm")?,
            service: parameters.remove("service"),
            scope: parameters.remove("scope"),
        }),
        _ => None,
    });
    known.collect()
}

/// Parses a quoted string, and returns it with the rest of the text.
fn unquote(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return (value, &text[at + 1..]),
            '\\' => value.extend(characters.next().map(|(_, escaped)| escaped)),
            other => value.push(other),
        }
    }
    (value, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(headers: &[&str], expect: &str) {
        let mut map = HeaderMap::new();
        for header in headers {
            map.append(WWW_AUTHENTICATE, header.parse().unwrap());
        }
        let got = match Challenge::parse(&map) {
            None => "nothing".to_owned(),
            Some(Challenge::Basic) => "basic".to_owned(),
            Some(Challenge::Bearer { realm, service, scope }) => format!(
                "{realm} {} {}",
                service.as_deref().unwrap_or("-"),
                scope.as_deref().unwrap_or("-")
            ),
        };
        assert_eq!(got, expect, "{headers:?}");
    }

    /// The first case is the example of `token.md`.
    #[test]
    fn what_a_server_wants() {
        check(
            &[
                r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:samalba/my-app:pull,push""#,
            ],
            "https://auth.docker.io/token registry.docker.io repository:samalba/my-app:pull,push",
        );
        check(&[r#"bearer realm = "https://a" , Service=x"#], "https://a x -");
        check(&[r#"Basic realm="x""#], "basic");
        check(&[r#"Basic realm="x", Bearer realm="https://a""#], "https://a - -");
        check(&[r#"Basic realm="x""#, r#"Bearer realm="https://a",scope="""#], "https://a - ");
        check(&[r#"Bearer realm="https://a\"b",error="x, y=z""#], "https://a\"b - -");
        check(&["Bearer service=x"], "nothing");
        check(&["Negotiate abc==", "Digest realm=\"x\""], "nothing");
        check(&["Basic"], "basic");
        check(&[""], "nothing");
        check(&["===,,,\"\""], "nothing");
        check(&[], "nothing");
    }
}
