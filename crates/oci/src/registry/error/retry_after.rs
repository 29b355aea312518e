//! The `Retry-After` header of responses.

use std::time::Duration;

use reqwest::header::{DATE, HeaderMap, RETRY_AFTER};

/// Returns the time after which a server accepts the next request. A date is compared with the `Date` header, because
/// the server's clock made both. Source: RFC 9110, section 10.2.3.
pub(super) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let then = httpdate::parse_http_date(text).ok()?;
    let now = httpdate::parse_http_date(headers.get(DATE)?.to_str().ok()?).ok()?;
    Some(then.duration_since(now).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(after: &str, now: Option<&str>, expect: Option<u64>) {
        let mut headers = HeaderMap::new();
        headers.insert(RETRY_AFTER, after.parse().unwrap());
        if let Some(now) = now {
            headers.insert(DATE, now.parse().unwrap());
        }
        assert_eq!(retry_after(&headers), expect.map(Duration::from_secs), "{after} {now:?}");
    }

    #[test]
    fn when_to_come_back() {
        check("7", None, Some(7));
        check(" 0 ", None, Some(0));
        check("-1", None, None);
        check("soon", None, None);
        let now = "Sun, 06 Nov 1994 08:49:37 GMT";
        check("Sun, 06 Nov 1994 08:50:00 GMT", Some(now), Some(23));
        check("Mon, 07 Nov 1994 08:49:37 GMT", Some(now), Some(86_400));
        check("Sat, 05 Nov 1994 08:49:37 GMT", Some(now), Some(0));
        check("Sun, 06 Nov 1994 08:50:00 GMT", None, None);
        check("Sun, 06 Nov 1994 08:50:00 GMT", Some("x"), None);
        // A leap day, as `date -ud TEXT +%s` counts it.
        let leap_day = "Thu, 29 Feb 2024 23:59:59 GMT";
        check("Fri, 01 Mar 2024 00:00:00 GMT", Some(leap_day), Some(1));
        for wrong in [
            "Sun, 06 Nov 1994 08:49:37 CET",
            "Sun, 06 Nov 1994 24:49:37 GMT",
            "Sun, 00 Nov 1994 08:49:37 GMT",
            "Sun, 06 Nov 99999999999999 08:49:37 GMT",
        ] {
            check(wrong, Some(now), None);
        }
    }
}
