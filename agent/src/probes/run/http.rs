//! HTTP probes.

use k8s_openapi::api::core::v1::HTTPGetAction;

use super::Outcome;
use super::Subject;
use crate::http_get::Caller;
use crate::http_get::HttpGet;
use crate::http_get::HttpGetError;
use crate::http_get::Response;
use crate::http_get::send;

pub(super) async fn run(caller: &Caller, subject: &Subject<'_>, action: &HTTPGetAction) -> Outcome {
    let ports = subject.target.container.ports.as_deref().unwrap_or_default();
    let answered = match HttpGet::new(action, ports, subject.address, caller) {
        Ok(request) => send(&request, subject.timeout).await,
        Err(error) => Err(error),
    };
    outcome(answered)
}

/// Bodies of failures are withheld: they may be confidential to the container's own users.
fn outcome(answered: Result<Response, HttpGetError>) -> Outcome {
    match answered {
        Ok(response) if response.status.is_success() => Outcome::Success,
        Ok(response) if response.status.is_redirection() => {
            let body = String::from_utf8_lossy(&response.body);
            Outcome::Warning(format!("Probe terminated redirects, Response body: {body}"))
        }
        Ok(response) => Outcome::Failure(format!("HTTP probe failed with statuscode: {}", response.status.as_u16())),
        Err(error @ (HttpGetError::Port(_) | HttpGetError::Host { .. })) => Outcome::error(error.to_string()),
        Err(error @ HttpGetError::Body { .. }) => Outcome::Error { state: "failure", message: error.to_string() },
        Err(error) => Outcome::Failure(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use http::StatusCode;
    use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

    use super::*;
    use crate::http_get::PortError;

    #[test]
    fn statuses_decide() {
        let answer = |status: u16, body: &'static str| {
            outcome(Ok(Response { status: StatusCode::from_u16(status).expect("a status"), body: body.into() }))
        };
        let failed = |status| Outcome::Failure(format!("HTTP probe failed with statuscode: {status}"));
        assert_eq!(answer(200, "secret"), Outcome::Success);
        assert_eq!(answer(299, ""), Outcome::Success);
        let text = "Probe terminated redirects, Response body: moved";
        assert_eq!(answer(302, "moved"), Outcome::Warning(text.to_owned()));
        for status in [199, 400, 404, 500] {
            assert_eq!(answer(status, "secret"), failed(status));
        }
    }

    /// A liveness probe that cannot be sent must not restart a container that runs under a kubelet.
    #[test]
    fn a_host_that_is_none_is_an_error() {
        let outcome_of = |host: &str| {
            let action =
                HTTPGetAction { host: Some(host.to_owned()), port: IntOrString::Int(80), ..HTTPGetAction::default() };
            HttpGet::new(&action, &[], "10.0.0.1", &Caller::probe("v1.36.3")).map_err(|error| outcome(Err(error)))
        };
        for (host, message) in [
            (
                "127.0.0.1:8080",
                "parse \"http://[127.0.0.1:8080]:80\": invalid host: \"127.0.0.1:8080\" is no IPv6 address",
            ),
            ("http://a", "parse \"http://[http://a]:80\": invalid host: \"http://a\" is no IPv6 address"),
            ("fe80::1%", "parse \"http://[fe80::1%25]:80\": invalid host: \"fe80::1%\" is no IPv6 address"),
            ("[abc]", "parse \"http://[abc]:80\": invalid IP-literal"),
            ("a b", "parse \"http://a b:80\": invalid URL escape \"%20\""),
            ("a/b", "parse \"http://a/b:80\": invalid URL escape \"%2F\""),
        ] {
            assert_eq!(outcome_of(host).expect_err(host), Outcome::error(message.to_owned()));
        }
        for host in
            ["", "localhost", "a_b.example", "münchen.example", "10.0.0.1", "::1", "::ffff:10.0.0.1", "fe80::1%eth0"]
        {
            outcome_of(host).expect(host);
        }
    }

    #[test]
    fn only_ports_and_bodies_are_errors() {
        let port = outcome(Err(HttpGetError::Port(PortError::Range(0))));
        assert_eq!(port, Outcome::error("invalid port number: 0".to_owned()));
        let body = outcome(Err(HttpGetError::Body { reason: "EOF".into() }));
        assert_eq!(body, Outcome::Error { state: "failure", message: "EOF".into() });
        let late = HttpGetError::Timeout { url: "http://a/".into() };
        assert_eq!(
            outcome(Err(late)),
            Outcome::Failure(
                "Get \"http://a/\": context deadline exceeded (Client.Timeout exceeded while awaiting headers)".into()
            )
        );
    }
}
