"""What a person does on any page, in a real browser."""

import pytest

from tests.ui.conftest import check_accessible, check_width, running_ui

TOKEN = "a-token-of-enough-characters"


@pytest.mark.parametrize("path", ["/", "/datasets", "/search?q=pets", "/nowhere"])
def test_pages_are_accessible_and_fit_a_narrow_window(ui, browser, path):
    # The browser itself writes the status 404 to the console, so this test does not use the fixture `page`.
    window = browser.new_page()
    window.goto(ui.url + path)
    check_accessible(window)
    check_width(window)
    window.close()


def test_keys_search_and_move_in_tables(ui, page):
    page.goto(ui.url + "/datasets")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.textContent") == "birds@1"
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.textContent") == "pets@2"
    page.goto(ui.url + "/")
    page.keyboard.press("/")
    page.keyboard.type("bir")
    page.keyboard.press("Enter")
    page.wait_for_url("**/search?q=bir")
    page.get_by_role("link", name="birds").wait_for()
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()


def test_a_user_logs_in_with_the_token_and_the_cookie_is_strict(filled, page):
    with running_ui(filled, token=TOKEN) as server:
        page.goto(server.url)
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button", name="Open").click()
        page.get_by_role("heading", name="Data sets").wait_for()
        # Requests of a page, such as that for its icon, must not come after the end of the server.
        page.wait_for_load_state("networkidle")
        (cookie,) = page.context.cookies()
        assert (cookie["sameSite"], cookie["httpOnly"]) == ("Strict", True)
        assert TOKEN not in cookie["value"]
        page.goto("about:blank")  # Home is live: the end of the server would be an error of its stream
